"""Workloads: when requests come, for which adapters, and how long they are.

Ours, as the generators of serving benchmarks (vLLM's, S-LoRA's) know neither adapters' popularity
nor tenants, or follow other laws than the papers. A workload is a function of its parameters and a
seed, drawn by `random.Random`, whose numbers are the same in every release of Python.
"""
