"""The client: an executor with products that run at a base executor."""
