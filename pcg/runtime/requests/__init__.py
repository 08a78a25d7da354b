"""Requests: their state in an engine, and the streams of their output."""
