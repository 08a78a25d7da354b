"""Sampling by Tinker's protocol: sampling sessions, and requests of samples."""
