"""Passes over one graph, or over a graph and its backward."""
