"""Training by a file: supervised, preference and reinforcement learning on one executor."""
