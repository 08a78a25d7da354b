"""Plan steps: requests by the scheduler, jobs by the rule of sharing."""
