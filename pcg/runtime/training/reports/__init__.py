"""Reports of a finetuning job while it runs: a progress bar, lines in the log, and its record."""
