"""The finetuning jobs of an engine: those of its own, and those whose loop runs beside it."""
