"""Run the steps of an engine on a device: a program with adapters and a KV cache."""
