"""Sampling: how the next token of each row is chosen, and the parameters that say so."""
