"""The report of a cut between a base and its client: `pcg explain --split`."""
