"""The bytes that eager transformers + peft save for backward: the first of the peers."""
