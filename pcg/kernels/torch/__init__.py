"""The functions that programs emitted for PyTorch call."""
