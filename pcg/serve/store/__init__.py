"""The durable store of a server: a folder with a database and files."""
