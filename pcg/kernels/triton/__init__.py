"""Kernels in Triton, written once, specialised by what they are called with."""
