"""Metrics of how alike two texts are, each from 0 to 1."""
