"""The trainer: an adapter that is trained command by command."""
