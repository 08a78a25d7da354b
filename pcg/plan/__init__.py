"""`pcg.plan`: machines for a workload, their memory, times and prices, and the best of them."""
