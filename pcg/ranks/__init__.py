"""The processes of a tensor-parallel group: starting them, and their messages."""
