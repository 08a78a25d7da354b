"""Finetuning data: rows, their formats, tokenized examples, and the order of batches."""
