"""Pages of records: a run with its curves, and several over each other."""
