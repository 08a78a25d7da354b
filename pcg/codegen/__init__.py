"""Emit programs as readable Python source."""
