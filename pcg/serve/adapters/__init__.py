"""Adapters as models: their names on the wire, loading and unloading."""
