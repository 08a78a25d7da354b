"""Adapters as models: names on the wire, and what answers to them."""
