"""Partition a program over a device mesh."""
