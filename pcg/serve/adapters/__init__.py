"""Adapters as models: their names on the wire, and the adapters of these names."""
