"""What eager transformers + peft keep for backward: the first of the peers."""
