"""Workloads: when requests come, for which adapters, and how long they are.

A workload is a function of its parameters and a seed, in the standard library alone.
"""
