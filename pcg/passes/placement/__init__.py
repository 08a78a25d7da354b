"""Cut between a base that holds the frozen weights and a client that holds all private data."""
