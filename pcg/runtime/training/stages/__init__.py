"""Training over pipeline stages: the order of micro-batches, and what is refused."""
