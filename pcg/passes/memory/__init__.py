"""Passes that choose the values that forward saves and backward recomputes."""
