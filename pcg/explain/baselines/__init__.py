"""Baselines of an explanation: the bytes PyTorch, transformers and peft save for backward."""
