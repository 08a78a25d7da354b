"""Latencies whose predictions are known to be exact."""

from __future__ import annotations

from pcg.runtime.admission.latency import Latencies, Latency


def certain(*latencies: Latency) -> Latencies:
    """Return latencies of those, which need no reserve, as after parts of any length."""
    exact = Latencies(*latencies)
    exact.longest = 2**20
    exact.backward.known.add(0)
    exact.reserve.share = 0.0
    return exact
