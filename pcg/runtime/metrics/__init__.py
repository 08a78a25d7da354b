"""Metrics of serving and finetuning, read from the event log."""
