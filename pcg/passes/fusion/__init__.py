"""Passes that fuse nodes: products, losses, gradients, and groups that one kernel runs."""
