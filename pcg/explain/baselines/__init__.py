"""Baselines of an explanation: what PyTorch, transformers and peft save for backward."""
