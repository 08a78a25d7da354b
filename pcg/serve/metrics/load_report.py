"""The load report that balancers ask for with a request, so that they need not scrape /metrics.

    endpoint-load-metrics-format: TEXT    in the request, or JSON
    endpoint-load-metrics: TEXT named_metrics.kv_cache_usage_perc=0.4, …    in the reply

Source: the native formats of ORCA (Open Request Cost Aggregation), with the two metrics of
vllm/entrypoints/serve/utils/orca_metrics.py.
"""

from __future__ import annotations

from pcg.runtime.metrics.status import EngineNumbers
from pcg.serve.http.wire import json_bytes

ASKED, REPORT = "endpoint-load-metrics-format", "endpoint-load-metrics"
"""The headers of the request and of the reply."""


def load_headers(asked: str | None, numbers: EngineNumbers) -> dict[str, str]:
    """Return the report as a header of the reply; none for a format that is not known.

    Args:
        asked: the request's format.
    """
    found = {
        "kv_cache_usage_perc": numbers.used_share,
        "num_requests_waiting": float(numbers.queued),
    }
    match (asked or "").strip().upper():
        case "TEXT":
            pairs = ", ".join(f"named_metrics.{name}={value}" for name, value in found.items())
            return {REPORT: f"TEXT {pairs}"}
        case "JSON":
            return {REPORT: f"JSON {json_bytes({'named_metrics': found}).decode()}"}
        case _:
            return {}
