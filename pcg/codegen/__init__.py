"""Emitters of programs as readable Python source."""
