"""Requests that move between simulated engines (Punica §5.3, figure 5).

A request that moves is cancelled at one engine and added to another like a new one, which
recomputes keys and values of its prompt and of its tokens so far. Two kinds move:

    preempted      the newest request of an engine that is out of pages
    consolidated   periodically, all requests of the engine with the fewest, if the others have room
                   for all; it is idle then, and can be handed back

The paper gives neither the period nor the load of a lightly loaded GPU; both are ours.
"""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass, field, replace

from pcg.runtime.memory.pool import pages_for
from pcg.runtime.requests.request import Request
from pcg.runtime.requests.sequence import Sequence, State
from pcg.simulate.simulated_engine import SimulatedEngine


@dataclass
class Migration:
    """The rule by which requests leave an engine.

    Attributes:
        most: the largest number of an engine's requests.
        light: the largest number of requests of an engine that may be emptied.
        period_s: the seconds between two searches for such an engine.
    """

    most: int = 32
    light: int = 8
    period_s: float = 5.0
    _next_s: float = field(default=0.0, init=False)

    def consolidated(
        self, engines: List[SimulatedEngine], place: int, now_s: float
    ) -> list[Sequence]:
        """Return all requests of an engine that is about to step, if they leave; oldest first."""
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
        return sorted(leaving, key=lambda one: one.times.submitted_s) if fits else []

    @staticmethod
    def preempted(engine: SimulatedEngine) -> list[Sequence]:
        """Return requests that lost their pages in the step that ended; oldest first."""
        waiting = engine.scheduler.waiting
        return [one for one in waiting if one.generated and one.state is State.WAITING]

    def _fit(self, leaving: List[Sequence], others: List[SimulatedEngine]) -> bool:
        """Return whether the other engines in use have room for all, the fullest first."""
        slots = [self.most - working_set(engine) for engine in others]
        pages = [free_pages(engine) for engine in others]
        brought: set[tuple[int, int]] = set()
        for one in leaving:
            adapter = one.request.adapter
            for i in sorted(range(len(others)), key=lambda i: slots[i]):
                adapters = others[i].scheduler.adapters
                key = i, 0 if adapter is None else adapter.version
                need = pages_for(one.length) + 1
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
    """Return the pages for new requests, less those that the present ones will soon need."""
    scheduler = engine.scheduler
    taken = sum(pages_for(one.length) for one in scheduler.waiting) + working_set(engine)
    return engine.pool.free + scheduler.adapters.idle_pages - taken


def continued(sequence: Sequence) -> Request:
    """Return the rest of a request: its tokens so far become a part of the prompt."""
    request, count = sequence.request, len(sequence.generated)
    params = replace(request.params, max_new_tokens=sequence.limit - count)
    return replace(request, prompt_ids=(*request.prompt_ids, *sequence.generated), params=params)
