"""The engine of a server behind a client interface, in any process."""
