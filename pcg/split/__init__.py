"""Split execution: the base model in one process, and its users' adapters in their own.

Source: Symbiosis (arXiv:2507.03220), §3.
"""
