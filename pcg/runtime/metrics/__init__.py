"""The event log, and metrics of serving and finetuning computed from it."""
