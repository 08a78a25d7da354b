"""Tool calls in a model's text: formats of model families, their parsers and their grammars."""
