"""Passes over a graph, or over a graph and its backward."""
