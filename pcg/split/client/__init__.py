"""The client: an executor whose products run at a base executor."""
