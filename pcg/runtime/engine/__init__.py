"""The co-serving engine: inference and token-level finetuning in the same steps."""
