"""Latencies whose predictions are known to be exact."""

from __future__ import annotations

from pcg.runtime.engine.latency import Latencies, Latency


def certain(*latencies: Latency) -> Latencies:
    """Return latencies of those, which need no reserve."""
    exact = Latencies(*latencies)
    exact.reserve.share = 0.0
    return exact
