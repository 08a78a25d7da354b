"""A program on its device: weights, the runner, and the token-flat batch."""
