"""Trace a Hugging Face causal LM into a token-flat graph."""
