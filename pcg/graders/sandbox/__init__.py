"""The sandbox of python graders: a process that can compute, and nothing else."""
