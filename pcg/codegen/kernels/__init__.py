"""The functions that emitted programs call."""
