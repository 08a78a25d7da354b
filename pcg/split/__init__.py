"""Split execution: the base model in a process, and its users' adapters in processes of the users.

Source: Symbiosis (arXiv:2507.03220), §3.
"""
