"""What the engine's own work costs a step: scheduler, pool, adapters and bookkeeping.

    python benchmarks/bench_scheduler.py [--rounds 3] [--steps 300]

The program is a stub that returns tokens at once, so that all of a step's time is the engine's. As
many requests as may run do; each that ends is followed by another. Adapters are 2,000, of which the
pool has room for about a quarter beside the requests; requests choose them by Zipf's law.

Contenders: 64, 128, 256 and 512 running requests; microseconds a step, and how they grow from each
to the next, which is twice as many.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from measure import interleave, medians, ratio, write

from pcg.runtime.engine.adapter_pages import AdapterPages
from pcg.runtime.engine.clock import MachineClock
from pcg.runtime.engine.engine import Engine, Latencies
from pcg.runtime.engine.events import EventLog
from pcg.runtime.engine.latency import Latency
from pcg.runtime.engine.request import Request
from pcg.runtime.engine.scheduler import Limits, Scheduler
from pcg.runtime.engine.sequence import Sequence
from pcg.runtime.page_pool import PagePool
from pcg.runtime.sampling_params import SamplingParams

ADAPTERS = 2000
PAGES_OF_ADAPTER = 4
PAGES_OF_REQUEST = 16
RUNNING = (64, 128, 256, 512)


@dataclass(frozen=True)
class StubAdapter:
    """An adapter without tensors."""

    name: str
    size_bytes: int = PAGES_OF_ADAPTER
    prompt_tokens: int = 0


class StubDevice:
    """Returns tokens at once."""

    cache = None

    def open(self, request: Request, number: int) -> Sequence:
        return Sequence(f"request {number}", number, request, request.params.max_new_tokens, 0.0)

    def run(self, chunks: Any, windows: Any) -> list[int]:
        return [1] * len(chunks)

    def back(self, unit: Any) -> None:
        """There are no jobs."""


class Load:
    """An engine with so many running requests, whatever ends."""

    def __init__(self, running: int) -> None:
        self._random = random.Random(running)
        pool = PagePool(running * PAGES_OF_REQUEST + PAGES_OF_ADAPTER * ADAPTERS // 4)
        limits = Limits(running=running, tokens=1 << 16, tpot_slo_s=60.0)
        scheduler = Scheduler(pool, AdapterPages(pool, 1), limits)
        latencies = Latencies(Latency(1e-6, 1e-9, 1e-12), Latency(1e-6, 1e-9, 1e-12))
        self.engine = Engine(
            StubDevice(), scheduler, MachineClock(), log=EventLog(0), latencies=latencies
        )
        self._adapters = [StubAdapter(f"adapter {i}") for i in range(ADAPTERS)]
        self._shares = [1 / (i + 1) for i in range(ADAPTERS)]
        for _ in range(running + 8):
            self._submit()
        for _ in range(200):
            self._step()

    def _submit(self) -> None:
        (adapter,) = self._random.choices(self._adapters, self._shares)
        prompt, new = self._random.randint(16, 96), self._random.randint(32, 128)
        self.engine.submit(Request((1,) * prompt, SamplingParams(max_new_tokens=new), adapter))

    def _step(self) -> float:
        started = time.perf_counter()
        chunks = self.engine.step()
        took = time.perf_counter() - started
        for chunk in chunks:
            if chunk.completion is not None:
                self._submit()
        return took

    def step_us(self, steps: int) -> float:
        """Microseconds a step."""
        return sum(self._step() for _ in range(steps)) / steps * 1e6


def contender(load: Load, steps: int) -> Callable[[], float]:
    """What measures one load."""
    return lambda: load.step_us(steps)


def main() -> None:
    """Run and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    loads = {running: Load(running) for running in RUNNING}
    values = interleave(
        {str(running): contender(load, arguments.steps) for running, load in loads.items()},
        arguments.rounds,
    )
    growth = {
        f"{after} / {before}": ratio(values, str(after), str(before))
        for before, after in pairwise(RUNNING)
    }
    write(
        "scheduler",
        {"adapters": ADAPTERS, "us_a_step": medians(values), "growth": growth},
    )


if __name__ == "__main__":
    main()
