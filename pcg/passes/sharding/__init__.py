"""Passes that make one rank's graph of a sharded one."""
