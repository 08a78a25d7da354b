"""Training by a file: supervised, preference and reinforcement learning on an executor."""
