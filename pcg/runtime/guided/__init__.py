"""Guided decoding: outputs that follow a JSON schema, a regex, a choice or a grammar."""
