"""Steps of the engine: those that are under way, and the parts of jobs that run in them."""
