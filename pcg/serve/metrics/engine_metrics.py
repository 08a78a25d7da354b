"""The page of metrics of a running engine, made beside it: no step waits for it, nor it for a step.

Endpoint pickers read it every 50 ms each, so a page is kept for 20 ms. It is made on the thread
that asks, from what the engine's thread counts anyway.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import Lock

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

from pcg.runtime.engine.async_engine import AsyncEngine
from pcg.serve.adapters.owned import Owned, OwnedName
from pcg.serve.metrics import own_families, vllm_families
from pcg.serve.metrics.exposition import Exposition

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_KEPT_S = 0.02
_PROCESS_KEPT_S = 1.0


@dataclass(frozen=True)
class Served:
    """The facts of a server that its metrics tell beside the engine's numbers.

    Attributes:
        model: the name of the base model.
        max_model_len: the most tokens of a sequence; None if there is no bound.
        most_adapters: the most adapters that a step can have.
        memory_bytes: bytes of the device by what has them.
        owned: returns whose an adapter or job is, of the engine's name for it.
    """

    model: str
    max_model_len: int | None
    most_adapters: int
    memory_bytes: Mapping[str, int] = field(default_factory=dict)
    owned: OwnedName = lambda name: Owned("", name)


class EngineMetrics:
    """The metrics of an engine as a page of text; for any thread."""

    def __init__(self, engine: AsyncEngine, served: Served) -> None:
        self._engine = engine
        self._served = served
        self._lock = Lock()
        self._to = Exposition({"model_name": served.model, "engine": "0"})
        self._process = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._process)
        self._of_process = b""
        self._process_read_s = -_PROCESS_KEPT_S
        self._page = b""
        self._made_s = -_KEPT_S

    def page(self) -> bytes:
        """Return the page in Prometheus' text format 0.0.4; at most 20 ms old."""
        with self._lock:
            now_s = time.monotonic()
            if now_s - self._made_s >= _KEPT_S:
                try:
                    self._write()
                finally:  # what was written of a page that failed is not of the next
                    page = self._to.page()
                self._page = page + self._process_part(now_s)
                self._made_s = now_s
            return self._page

    def _write(self) -> None:
        to, served, engine = self._to, self._served, self._engine
        numbers = engine.numbers()
        totals = numbers.totals
        vllm_families.write_state(to, numbers)
        vllm_families.write_adapters(to, totals.adapters, served.most_adapters, served.owned)
        vllm_families.write_counts(to, totals)
        vllm_families.write_times(to, totals)
        vllm_families.write_sizes(to, totals, served.max_model_len)
        own_families.write_adapters(to, totals.adapters, served.owned)
        own_families.write_jobs(to, totals, engine.jobs(), served.owned)
        own_families.write_promises(to, totals)
        own_families.write_memory(to, numbers, served.memory_bytes)

    def _process_part(self, now_s: float) -> bytes:
        """Return what prometheus_client tells of the process, a second old at most."""
        if now_s - self._process_read_s >= _PROCESS_KEPT_S:
            self._of_process = generate_latest(self._process)
            self._process_read_s = now_s
        return self._of_process
