"""`pcg bench`: workloads served by an engine, and how it went."""
