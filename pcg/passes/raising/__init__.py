"""Raise elementary arithmetic to larger operators."""
