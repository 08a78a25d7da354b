"""Passes that fuse nodes: products, losses, gradients, and groups for a single kernel."""
