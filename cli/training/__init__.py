"""Commands that train adapters."""
