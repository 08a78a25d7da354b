"""Direct preference optimization: an adapter learns which of two outputs is preferred."""
