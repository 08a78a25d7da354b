"""The processes of a tensor-parallel group: starting them, and what they exchange."""
