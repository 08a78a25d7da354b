"""Errors, callers and their limits, bodies, middleware and the service: the base of all routes."""
