"""Metrics for Prometheus: with vLLM's names, so that its boards and routers work, and our own."""
