"""The functions that emitted programs call: PyTorch's in `torch`, Triton's in `triton`."""
