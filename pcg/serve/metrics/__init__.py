"""Metrics for Prometheus: vLLM's families, for its boards and routers, and pcg's."""
