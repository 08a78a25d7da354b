"""Admission: limits, predicted latencies, queues, and policies of the order of requests."""
