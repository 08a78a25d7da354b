"""Adapters on the device: the tables that programs read, slots, row memory, and the cache."""
