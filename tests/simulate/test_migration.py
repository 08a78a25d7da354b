"""Requests that move between engines: all of their tokens come, once, and engines are emptied."""

from __future__ import annotations

from collections import Counter

import pytest

from pcg.runtime.admission.limits import Limits
from pcg.runtime.metrics.events import Event, Kind
from pcg.runtime.requests.sequence import Sequence
from pcg.simulate.simulated_device import SimulatedAdapter
from pcg.simulate.simulated_engine import SimulatedEngine
from pcg.simulate.simulation import FullestFirst, Migration, Simulation
from pcg.simulate.workload import TimedRequest, Workload
from tests.support.linear_costs import LinearCosts


def run(
    requests: list[TimedRequest], engines: int, pages: int, most: int, migration: Migration | None
) -> tuple[Simulation, list[tuple[int, Sequence]], tuple[Event, ...]]:
    made = [
        SimulatedEngine(LinearCosts(), pages, 1000, Limits(running=most)) for _ in range(engines)
    ]
    moved: list[tuple[int, Sequence]] = []
    adapters = {name: SimulatedAdapter(name, 3000) for name in ("a", "b")}
    simulation = Simulation(made, FullestFirst(most), adapters, migration=migration)
    simulation.on_move = lambda place, sequence: moved.append((place, sequence))
    events = simulation.run(Workload(tuple(requests)))
    for engine in made:
        engine.check_integrity()
        assert engine.is_idle
    return simulation, moved, events


def tokens_of(events: tuple[Event, ...]) -> int:
    return sum(event.kind is Kind.TOKEN for event in events)


def busy_s(simulation: Simulation) -> float:
    return sum(engine.device.busy_s for engine in simulation.engines)


def test_a_lightly_loaded_engine_is_emptied() -> None:
    """Six requests fill an engine, and a seventh has one for itself until two of them end."""
    adapters = ["a", "b", None]
    requests = [TimedRequest(0.0, adapters[i % 3], 20, 400 if i > 1 else 50) for i in range(7)]
    without, _, before = run(requests, 2, 400, 6, None)
    found, moved, events = run(requests, 2, 400, 6, Migration(6, 3, period_s=0.5))
    ((place, sequence),) = moved
    # The seventh went on where there was room, from the prompt and its tokens so far.
    assert (place, sequence.request.prompt_ids) == (0, (1,) * 20)
    assert 50 <= len(sequence.generated) < 150
    assert len(found.resumed) == 1
    assert tokens_of(events) == tokens_of(before) == 2 * 50 + 5 * 400
    submitted = [e.details["prompt_tokens"] for e in events if e.kind is Kind.SUBMITTED]
    assert sorted(submitted)[-1] == 20 + len(sequence.generated)
    # Five requests at one engine keep one busy instead of two.
    assert busy_s(found) < 0.75 * busy_s(without)


def test_an_engine_stays_where_others_have_no_room() -> None:
    requests = [TimedRequest(0.0, None, 20, 100) for _ in range(7)]
    # All end together: there is no slot for the seventh as long as it runs.
    _, moved, _ = run(requests, 2, 400, 6, Migration(6, 3, period_s=0.1))
    assert moved == []
    # Slots, and no pages.
    requests = [TimedRequest(0.0, None, 150, 40), TimedRequest(0.0, None, 150, 40)]
    _, moved, _ = run(requests, 2, 14, 6, Migration(6, 3, period_s=0.1))
    assert moved == []


@pytest.mark.parametrize("migration", [None, Migration(4, 0)], ids=["stays", "moves"])
def test_what_is_preempted_goes_where_there_is_room(migration: Migration | None) -> None:
    requests = [TimedRequest(0.1 * i, None, 20, 60) for i in range(4)]
    simulation, moved, events = run(requests, 2, 9, 4, migration)
    kinds = Counter(event.kind for event in events)
    assert kinds[Kind.PREEMPTED] > 0
    assert kinds[Kind.TOKEN] == 4 * 60
    assert kinds[Kind.FINISHED] == 4
    assert bool(moved) == bool(simulation.resumed) == (migration is not None)
