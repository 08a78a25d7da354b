"""The heads that attention's kernels know; here for what is emitted without Triton at hand."""

HEAD_SIZES = (16, 32, 64, 80, 96, 128, 192, 256)
"""Elements of a head, of queries and keys or of values."""
HEAD_DTYPES = ("f32", "bf16", "f16")
"""Theirs, as types of values name them."""
