"""The event log, and metrics of serving and finetuning that are read from it."""
