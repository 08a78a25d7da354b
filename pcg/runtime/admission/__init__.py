"""Admission: which requests may wait, and whose turn it is among those that do."""
