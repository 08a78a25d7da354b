"""The cut between a base that holds frozen weights and a client that holds everything private."""
