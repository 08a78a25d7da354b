"""Emit programs as Python source, and the kernels that they call."""
