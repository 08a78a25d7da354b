"""Run a compiled program: adapters, batches, generation and finetuning."""
