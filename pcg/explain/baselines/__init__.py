"""Baselines of an explanation: bytes that PyTorch, transformers and peft save for backward."""
