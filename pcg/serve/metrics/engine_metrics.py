"""GET /metrics: the metrics of a running engine, rendered without blocking it.

Endpoint pickers read the state every 50 ms: running and waiting requests, pages and adapters. So
the page has three parts, and a request renders a part again if it is older than:

    state       20 ms
    counts      0.5 s, counters and histograms; 20 ms while the engine is idle
    process     5 s, prometheus_client's metrics of the process

The parts are rendered from numbers that the engine's thread maintains anyway. A client that reads
rarely, such as a metrics database, gets all parts fresh.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TypeVar

from fastapi import APIRouter, Depends, Request
from fastapi.responses import PlainTextResponse
from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    Metric,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as AsgiScope

from pcg.keys import Scope
from pcg.runtime.engine.commands import Jobs, Numbers
from pcg.runtime.metrics.status import EngineNumbers
from pcg.serve.engine.client import EngineClient
from pcg.serve.http.caller import Caller, RequiredScope
from pcg.serve.http.service import Service, ServiceDependency
from pcg.serve.http.wire import json_bytes
from pcg.serve.metrics.families import Families, Served

Result = TypeVar("Result")

PATH = "/metrics"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_KEPT_S = {"state": 0.02, "counts": 0.5, "process": 5.0}


class EngineMetrics:
    """The metrics of an engine as a text page; for a single event loop.

    Args:
        now_s: a clock, seconds.
    """

    def __init__(
        self, client: EngineClient, served: Served, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = client
        self._now_s = now_s
        self._lock = asyncio.Lock()
        self._families = Families(served)
        self._made_s = dict.fromkeys(_KEPT_S, -math.inf)
        self._texts = dict.fromkeys(_KEPT_S, b"")
        self._process = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._process)
        pid = client.facts.pid
        if pid != os.getpid():
            ProcessCollector("pcg_engine", pid=lambda: pid, registry=self._process)
        self._page = b""

    async def page(self) -> bytes:
        """Return the page in Prometheus' text format 0.0.4."""
        async with self._lock:
            now_s = self._now_s()
            if now_s - self._made_s["state"] < _KEPT_S["state"]:
                return self._page
            numbers = await _result(self._client.call(Numbers()))
            self._make("state", now_s, _registry(self._families.state(numbers)))
            is_idle = not (numbers.running or numbers.queued)
            if now_s - self._made_s["counts"] >= _KEPT_S["state" if is_idle else "counts"]:
                jobs = await _result(self._client.call(Jobs()))
                families = self._families.counts(numbers, jobs, list(self._client.adapters))
                self._make("counts", now_s, _registry(families))
            if now_s - self._made_s["process"] >= _KEPT_S["process"]:
                self._make("process", now_s, self._process)
            self._page = b"".join(self._texts.values())
            return self._page

    def _make(self, part: str, now_s: float, registry: CollectorRegistry) -> None:
        self._texts[part] = generate_latest(registry)
        self._made_s[part] = now_s


async def _result(future: Future[Result]) -> Result:
    """Return a future's result, without yielding to the event loop if it is done."""
    return future.result() if future.done() else await asyncio.wrap_future(future)


class _Made(Collector):
    """A collector of finished families."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._made = list(families)

    def collect(self) -> Iterable[Metric]:
        return self._made


def _registry(families: Iterable[Metric]) -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Made(families))
    return registry


# ------------------------------------------------------------------------------------------- route

router = APIRouter(tags=["server"])


class ReadsMetrics(RequiredScope):
    """The page's dependency: a key with the scope `metrics` or `admin`, unless it is public."""

    async def __call__(self, request: Request) -> Caller | None:  # type: ignore[override]
        service: Service = request.app.state.service
        caller: Caller | None = request.scope["state"].get("caller")
        return caller if service.may_read_metrics(caller) else await super().__call__(request)


@router.get(
    PATH, response_class=PlainTextResponse, dependencies=[Depends(ReadsMetrics(Scope.METRICS))]
)
async def metrics(service: ServiceDependency) -> PlainTextResponse:
    """Return the metrics in Prometheus' text format."""
    return PlainTextResponse(await service.part(EngineMetrics).page(), media_type=CONTENT_TYPE)


class Scrapes:
    """ASGI middleware that answers GET /metrics for callers that may read it.

    It runs after the authentication and before the limits and the framework, because endpoint
    pickers send a request every 50 ms. The route documents the page and sends the refusals.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app = app
        self._service = service
        (self._route,) = router.routes

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        target = (scope["type"], scope.get("method"), scope.get("path"))
        service = self._service
        caller: Caller | None = scope.get("state", {}).get("caller")
        if target != ("http", "GET", PATH) or not service.may_read_metrics(caller):
            await self.app(scope, receive, send)
            return
        scope["route"] = self._route
        page = await service.part(EngineMetrics).page()
        headers = [
            (b"content-type", CONTENT_TYPE.encode()),
            (b"content-length", b"%d" % len(page)),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": page})


# ------------------------------------------------------------------------------------- load report

ASKED, REPORT = "endpoint-load-metrics-format", "endpoint-load-metrics"
"""Headers of the request and of the reply."""


def load_headers(format: str | None, numbers: EngineNumbers) -> dict[str, str]:
    """Return the load report that balancers request with a header, in place of scrapes.

    endpoint-load-metrics-format: TEXT    in the request, or JSON
    endpoint-load-metrics: TEXT named_metrics.kv_cache_usage_perc=0.4, …    in the reply

    Args:
        format: the requested format; an unknown format gets no report.

    Source: the native formats of ORCA (Open Request Cost Aggregation), with the two metrics of
        vllm/entrypoints/serve/utils/orca_metrics.py.
    """
    load = {
        "kv_cache_usage_perc": numbers.used_share,
        "num_requests_waiting": float(numbers.queued),
    }
    match (format or "").strip().upper():
        case "TEXT":
            pairs = ", ".join(f"named_metrics.{name}={value}" for name, value in load.items())
            return {REPORT: f"TEXT {pairs}"}
        case "JSON":
            return {REPORT: f"JSON {json_bytes({'named_metrics': load}).decode()}"}
        case _:
            return {}
