"""Metrics of serving and finetuning, from the event log."""
