"""The papers' serving experiments, on simulated machines."""
