"""Custom losses of clients: graphs that are checked and kept."""
