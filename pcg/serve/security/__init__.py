"""Keys, the callers that they stand for, and the limits of what callers may send."""
