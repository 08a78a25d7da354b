"""Passes over graphs, and the pipeline that runs them."""
