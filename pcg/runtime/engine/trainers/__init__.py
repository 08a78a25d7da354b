"""Trainers of an engine on a thread: their commands, and the jobs that these are."""
