"""Replay of a workload on simulated engines: one, several side by side, or a cluster.

Each engine has its own clock. The engine with the earliest clock runs next, so that a request meets
every engine in its state at the arrival, up to the step in progress. A router chooses the engine of
a request:

    RoundRobin    engines in turn: pipelines behind a plain load balancer; or only some engines, if
                  the others only train (separate instances, FlexLLM v2 §8.1)
    FullestFirst  the engine with the largest batch below its limit and pages for the request;
                  otherwise the request waits, first come, first served (Punica §5.1)

Requests may move between simulated engines (Punica §5.3, figure 5). A moved request is cancelled
at an engine and added to another as a new request, which recomputes the keys and values of its
prompt and generated tokens. Two kinds of requests move:

    preempted      the newest request of an engine that is out of pages
    consolidated   periodically, all requests of the engine with the fewest, if the other engines
                   have room for all; the idle engine can then be released

The paper gives neither the period nor the load of a lightly loaded GPU; both are assumptions.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass, field, replace
from typing import Protocol

from pcg.errors import BenchmarkError, OutOfMemoryError
from pcg.runtime.adapters.cache import ServedAdapter
from pcg.runtime.memory.pool import pages_for
from pcg.runtime.metrics.events import Event
from pcg.runtime.requests.request import Request
from pcg.runtime.requests.sequence import Sequence, State
from pcg.runtime.sampling.sampling_params import SamplingParams
from pcg.simulate.simulated_engine import SimulatedEngine
from pcg.simulate.workload import TimedRequest, Workload


@dataclass
class Migration:
    """The rule by which requests leave an engine.

    Attributes:
        most: the maximum number of requests of an engine.
        light: the maximum number of requests of an engine that may be emptied.
        period_s: the seconds between two searches for such an engine.
    """

    most: int = 32
    light: int = 8
    period_s: float = 5.0
    _next_s: float = field(default=0.0, init=False)

    def consolidated(
        self, engines: List[SimulatedEngine], place: int, now_s: float
    ) -> list[Sequence]:
        """Return all requests, oldest first, of an engine before its step if they leave it."""
        if now_s < self._next_s:
            return []
        sizes = {i: working_set(engine) for i, engine in enumerate(engines) if working_set(engine)}
        if place not in sizes or min(sizes, key=lambda i: (sizes[i], i)) != place:
            return []  # another engine has the fewest
        self._next_s = now_s + self.period_s
        scheduler = engines[place].scheduler
        leaving = [*scheduler.running, *scheduler.waiting]
        others = [engines[i] for i in sizes if i != place]
        fits = len(leaving) <= self.light and self._fit(leaving, others)
        return sorted(leaving, key=lambda sequence: sequence.times.submitted_s) if fits else []

    @staticmethod
    def preempted(engine: SimulatedEngine) -> list[Sequence]:
        """Return the requests, oldest first, that lost their pages in the previous step."""
        waiting = engine.scheduler.waiting
        return [
            sequence
            for sequence in waiting
            if sequence.generated and sequence.state is State.WAITING
        ]

    def _fit(self, leaving: List[Sequence], others: List[SimulatedEngine]) -> bool:
        """Return whether the other engines in use have room for all requests, fullest first."""
        slots = [self.most - working_set(engine) for engine in others]
        pages = [free_pages(engine) for engine in others]
        brought: set[tuple[int, int]] = set()
        for sequence in leaving:
            adapter = sequence.request.adapter
            for i in sorted(range(len(others)), key=lambda i: slots[i]):
                adapters = others[i].scheduler.adapters
                key = i, 0 if adapter is None else adapter.version
                need = pages_for(sequence.length) + 1
                if not adapters.has(adapter) and key not in brought:
                    need += adapters.pages_of(adapter)
                if slots[i] > 0 and need <= pages[i]:
                    slots[i], pages[i] = slots[i] - 1, pages[i] - need
                    brought.add(key)
                    break
            else:
                return False
        return True


def working_set(engine: SimulatedEngine) -> int:
    """Return the number of an engine's requests, running or waiting."""
    return len(engine.scheduler.running) + len(engine.scheduler.waiting)


def free_pages(engine: SimulatedEngine) -> int:
    """Return the free pages, less the pages that present requests will soon need."""
    scheduler = engine.scheduler
    taken = sum(pages_for(sequence.length) for sequence in scheduler.waiting) + working_set(engine)
    return engine.pool.free + scheduler.adapters.idle_pages - taken


def continued(sequence: Sequence) -> Request:
    """Return the rest of a request: its generated tokens become a part of the prompt."""
    request, count = sequence.request, len(sequence.generated)
    params = replace(request.params, max_new_tokens=sequence.limit - count)
    return replace(request, prompt_ids=(*request.prompt_ids, *sequence.generated), params=params)


class Router(Protocol):
    """Chooses an engine for a request."""

    def choose(self, engines: List[SimulatedEngine], request: Request) -> int | None:
        """Return the index of the request's engine; None to let the request wait."""


@dataclass
class RoundRobin:
    """Chooses engines in turn.

    Attributes:
        serving: the number of serving engines, which are the first engines; None for all.
    """

    serving: int | None = None
    _next: int = field(default=0, init=False)

    def choose(self, engines: List[SimulatedEngine], request: Request) -> int | None:
        place = self._next % (self.serving or len(engines))
        self._next += 1
        return place


@dataclass(frozen=True)
class FullestFirst:
    """Chooses the engine with the largest batch that has room; the last of equal engines.

    Attributes:
        most: the largest batch, in requests.
    """

    most: int = 32

    def choose(self, engines: List[SimulatedEngine], request: Request) -> int | None:
        fitting = [
            (working_set(engine), place)
            for place, engine in enumerate(engines)
            if working_set(engine) < self.most and _has_room(engine, request)
        ]
        return max(fitting)[1] if fitting else None


def _has_room(engine: SimulatedEngine, request: Request) -> bool:
    """Return whether pages suffice for the prompt and a page for each present request."""
    adapters, need = engine.scheduler.adapters, pages_for(request.length)
    if not adapters.has(request.adapter):
        need += adapters.pages_of(request.adapter)
    return need <= free_pages(engine)


@dataclass(frozen=True)
class _Waiting:
    """A request without an engine, its arrival, and whether it has generated tokens."""

    came_s: float
    request: Request
    has_begun: bool = False


@dataclass
class Simulation:
    """Engines that serve a workload.

    Attributes:
        engines: the engines, with their jobs.
        router: the rule that chooses among them.
        on_step: called with an engine's index after each of its steps.
        migration: the rule by which requests leave engines; None for none.
        on_move: called with an engine's index and a request that leaves it.
        resumed: (index, id) of requests that started at another engine; the engines' logs list them
            as a cancelled request and a new request.
    """

    engines: List[SimulatedEngine]
    router: Router
    adapters: Mapping[str, ServedAdapter] = field(default_factory=dict)
    on_step: Callable[[int], None] = lambda place: None
    migration: Migration | None = None
    on_move: Callable[[int, Sequence], None] = lambda place, sequence: None
    resumed: set[tuple[int, str]] = field(default_factory=set)

    def run(self, workload: Workload, jobs_end_s: float = math.inf) -> tuple[Event, ...]:
        """Serve a workload until no work remains.

        Args:
            jobs_end_s: the time at which the remaining jobs are cancelled.
        Returns:
            The events of all engines in order of time; subjects start with their engine's index.
        Raises:
            BenchmarkError: an adapter is missing, or a request fits no engine.
        """
        coming = deque(workload)
        waiting: deque[_Waiting] = deque()
        while True:
            busy = [place for place, engine in enumerate(self.engines) if not engine.is_idle]
            place = min(busy, key=lambda i: self.engines[i].clock.now_s(), default=None)
            now = math.inf if place is None else self.engines[place].clock.now_s()
            if coming and coming[0].time_s <= now:
                timed = coming.popleft()
                waiting.append(_Waiting(timed.time_s, self._request(timed)))
                self._route(waiting, timed.time_s)
            elif place is not None:
                engine = self.engines[place]
                if now >= jobs_end_s:
                    for job in list(engine.jobs):
                        engine.cancel_job(job.name)
                if self.migration is not None:
                    leaving = self.migration.consolidated(self.engines, place, now)
                    self._move(place, leaving, waiting)
                engine.step()
                self.on_step(place)
                if self.migration is not None:
                    self._move(place, self.migration.preempted(engine), waiting)
                self._route(waiting, engine.clock.now_s())
            elif waiting:
                raise BenchmarkError(f"{len(waiting)} requests fit no engine, not even an idle one")
            else:
                return self._events()

    def _move(self, place: int, leaving: List[Sequence], waiting: deque[_Waiting]) -> None:
        """Move requests from an engine to the front of the waiting requests."""
        for sequence in reversed(leaving):
            has_begun = (place, sequence.id) in self.resumed or bool(sequence.generated)
            self.on_move(place, sequence)
            self.engines[place].cancel(sequence.id)
            waiting.appendleft(_Waiting(sequence.times.submitted_s, continued(sequence), has_begun))
        if leaving:
            self._route(waiting, self.engines[place].clock.now_s())

    def _route(self, waiting: deque[_Waiting], now_s: float) -> None:
        while waiting:
            first = waiting[0]
            place = self.router.choose(self.engines, first.request)
            if place is None:
                return
            waiting.popleft()
            engine = self.engines[place]
            if engine.is_idle:
                engine.clock.wait_until(now_s)
            try:
                request_id = engine.submit(first.request, first.came_s)
            except OutOfMemoryError:
                continue  # the log records it
            if first.has_begun:
                self.resumed.add((place, request_id))

    def _request(self, timed: TimedRequest) -> Request:
        adapter = None
        if timed.adapter is not None:
            adapter = self.adapters.get(timed.adapter)
            if adapter is None:
                raise BenchmarkError(f"adapter {timed.adapter!r} of the workload is not there")
        params = SamplingParams(max_new_tokens=timed.output_tokens, ignore_eos=True)
        return Request((1,) * timed.prompt_tokens, params, adapter, timed.tenant or "")

    def _events(self) -> tuple[Event, ...]:
        events = [
            event._replace(subject=f"{place}: {event.subject}")
            for place, engine in enumerate(self.engines)
            for event in engine.log
        ]
        return tuple(sorted(events, key=lambda event: event.time_s))
