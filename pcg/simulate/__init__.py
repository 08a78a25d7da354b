"""Engines and devices on a simulated clock, workloads, and the papers' experiments."""
