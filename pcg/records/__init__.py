"""Records of runs: numbers of each step, the configuration, samples, and a page with curves."""
