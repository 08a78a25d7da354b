"""Paged attention in Triton: the work lists, the cache, forward and backward."""
