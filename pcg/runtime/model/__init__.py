"""A program on its device: weights, the runner, the token-flat batch, and sampling."""
