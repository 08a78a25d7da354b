"""The page of metrics of a running engine, made beside it: no step waits for it, nor it for a step.

Endpoint pickers read it every 50 ms each, and what they look for is the state: requests that run
and wait, pages, adapters. So the page has three parts, each made again when it is asked for and
older than this:

    state       20 ms
    counts      0.5 s, counters and histograms; 20 ms while there is nothing to serve
    process     5 s, what prometheus_client tells of it

They are made beside the engine, from what its thread counts anyway, and tells meanwhile. Who asks
seldom, as a database of metrics does, has all of them made for it.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

from pcg.runtime.engine.commands import Jobs, Numbers
from pcg.runtime.metrics.status import EngineNumbers, JobStatus
from pcg.serve.engine.client import EngineClient
from pcg.serve.engine.engine_names import Owned, OwnedName
from pcg.serve.metrics import own_families, vllm_families
from pcg.serve.metrics.exposition import Exposition

Result = TypeVar("Result")

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_KEPT_S = 0.02
_COUNTS_KEPT_S = 0.5
_PROCESS_KEPT_S = 5.0


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
    """The metrics of an engine as a page of text; for one event loop.

    Args:
        now_s: a clock, seconds.
    """

    def __init__(
        self, client: EngineClient, served: Served, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = client
        self._served = served
        self._now_s = now_s
        self._lock = asyncio.Lock()
        common = {"model_name": served.model, "engine": "0"}
        self._state = _Part(Exposition(common))
        self._counts = _Part(Exposition(common))
        self._process = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._process)
        pid = client.facts.pid
        if pid != os.getpid():
            ProcessCollector("pcg_engine", pid=lambda: pid, registry=self._process)
        self._of_process = b""
        self._process_read_s = -math.inf
        self._page = b""

    async def page(self) -> bytes:
        """Return the page in Prometheus' text format 0.0.4."""
        async with self._lock:
            now_s = self._now_s()
            if now_s - self._state.made_s >= _KEPT_S:
                numbers = await _result(self._client.call(Numbers()))
                self._state.make(now_s, lambda to: self._write_state(to, numbers))
                is_idle = not (numbers.running or numbers.queued)
                kept_s = _KEPT_S if is_idle else _COUNTS_KEPT_S
                if now_s - self._counts.made_s >= kept_s:
                    jobs = await _result(self._client.call(Jobs()))
                    self._counts.make(now_s, lambda to: self._write_counts(to, numbers, jobs))
                self._page = self._state.text + self._counts.text + self._process_part(now_s)
            return self._page

    def _write_state(self, to: Exposition, numbers: EngineNumbers) -> None:
        served = self._served
        vllm_families.write_state(to, numbers)
        vllm_families.write_adapters(
            to, numbers.totals.adapters, served.most_adapters, served.owned
        )

    def _write_counts(
        self, to: Exposition, numbers: EngineNumbers, jobs: Sequence[JobStatus]
    ) -> None:
        served, totals = self._served, numbers.totals
        vllm_families.write_counts(to, totals)
        vllm_families.write_times(to, totals)
        vllm_families.write_sizes(to, totals, served.max_model_len)
        in_host = list(self._client.adapters)
        own_families.write_adapters(to, totals.adapters, in_host, served.owned)
        own_families.write_jobs(to, totals, jobs, served.owned)
        own_families.write_promises(to, totals)
        own_families.write_late(to, numbers)
        own_families.write_memory(to, numbers, served.memory_bytes)

    def _process_part(self, now_s: float) -> bytes:
        """Return what prometheus_client tells of the process."""
        if now_s - self._process_read_s >= _PROCESS_KEPT_S:
            self._of_process = generate_latest(self._process)
            self._process_read_s = now_s
        return self._of_process


async def _result(future: Future[Result]) -> Result:
    """Return a future's result, without a turn of the event loop where it is there."""
    return future.result() if future.done() else await asyncio.wrap_future(future)


class _Part:
    """A part of the page, as it was made last.

    Attributes:
        made_s: when, seconds of the monotonic clock.
    """

    def __init__(self, to: Exposition) -> None:
        self.text = b""
        self.made_s = -math.inf
        self._to = to

    def make(self, now_s: float, write: Callable[[Exposition], None]) -> None:
        """Make it again."""
        try:
            write(self._to)
        finally:  # what was written of a part that failed is not of the next
            text = self._to.page()
        self.text, self.made_s = text, now_s
