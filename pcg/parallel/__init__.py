"""Partitioning of a program over a device mesh."""
