"""`pcg.plan`: machines for a workload, with memory, times and prices, and the cheapest."""
