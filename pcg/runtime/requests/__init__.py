"""Requests: what is asked, their state while they run, and the streams of their output."""
