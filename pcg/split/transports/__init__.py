"""Transports between clients and a base executor, behind one interface."""
