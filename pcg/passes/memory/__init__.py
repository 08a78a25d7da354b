"""Passes that choose what forward saves and what backward recomputes."""
