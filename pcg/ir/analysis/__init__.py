"""Properties of graphs that passes and reports share: storage, saved memory, trained parameters."""
