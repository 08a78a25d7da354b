"""The durable store of a server: a database and files beside it, in one folder."""
