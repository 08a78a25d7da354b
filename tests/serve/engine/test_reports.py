"""Reports of an engine's numbers: true at every moment, whole at rest, and none for nobody."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event
from typing import Any

import msgspec
import pytest

from pcg.runtime.admission.limits import Limits
from pcg.runtime.engine.async_engine import AsyncEngine
from pcg.runtime.metrics.status import EngineNumbers
from pcg.runtime.requests.stream import Wakes
from pcg.serve.engine.messages import (
    Report,
    ToEngine,
    ToServer,
    Watch,
    decoder,
    encode,
    plain,
    plain_state,
)
from pcg.serve.engine.reports import Reports, WatchedNumbers
from tests.support.prompts import prompts
from tests.support.small_engine import DATA, LORA, OPTIONS, make_engine, make_executor
from tests.support.waiting import until


class Crossing:
    """An engine's reports on their way to who watches them, without processes between.

    Attributes:
        asked: messages to the engine.
        came: reports to the server; some come with the next one that is sent by itself.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self.asked: list[Watch] = []
        self.came: list[Report] = []
        self._held: list[bytes] = []
        self.watched = WatchedNumbers(self._post)
        self._reports = Reports(engine, self._send)

    def _post(self, message: bytes) -> None:
        self.asked.append(decoder(ToEngine)(message))
        self._reports.watch(self.asked[-1])

    def _send(self, report: Report, wakes: Wakes | None) -> None:
        self._held.append(encode(report))
        if wakes is not None:
            held, self._held = self._held, []
            self.came += map(decoder(ToServer), held)
            for one in self.came[-len(held) :]:
                self.watched.take(one)

    def numbers(self) -> EngineNumbers:
        """The numbers, once a first report has come."""
        until(lambda: self.watched.numbers() is not None)
        found = self.watched.numbers()
        assert found is not None
        return found


@pytest.fixture
def running() -> Iterator[AsyncEngine]:
    executor = make_executor()
    executor.add_adapter("second", LORA)
    with make_engine(executor, 64, Limits(running=2, tokens=24)).start() as engine:
        yield engine


def state_of(numbers: EngineNumbers) -> tuple[Any, ...]:
    adapters = numbers.totals.adapters
    return plain_state(numbers), dict(adapters.resident), dict(adapters.waiting)


def test_the_state_is_that_of_the_engine_whenever_a_step_begins(
    running: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps may be long: who asks while one runs sees what it admitted. Pages come with its end."""
    crossing, start = Crossing(running), running.engine.device.start
    assert state_of(crossing.numbers()) == state_of(running.numbers())
    pairs = []

    def compared(*arguments: Any) -> Any:
        pairs.append((state_of(crossing.numbers()), state_of(running.numbers())))
        return start(*arguments)

    monkeypatch.setattr(running.engine.device, "start", compared)
    all_came = Event()
    running.call(all_came.wait)
    streams = [
        running.submit(ids, adapter, max_new_tokens=20, ignore_eos=True)
        for ids, adapter in zip(prompts((9, 21, 30)), ("a", None, "second"), strict=True)
    ]
    all_came.set()
    for stream in streams:
        stream.wait(60)
    assert state_of(crossing.numbers()) == state_of(running.numbers())
    for told, true in pairs:
        told[0]["free_pages"] = true[0]["free_pages"]
    assert [told for told, _ in pairs] == [true for _, true in pairs]
    assert max(told[0]["running"] for told, _ in pairs) == 2
    assert max(told[2].get("second", 0) for told, _ in pairs) == 1


def test_a_request_runs_as_soon_as_its_step_is_under_way(
    running: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    crossing = Crossing(running)
    assert crossing.numbers().running == 0
    start, is_there, go = running.engine.device.start, Event(), Event()

    def held(*arguments: Any) -> Any:
        is_there.set()
        assert go.wait(60)
        return start(*arguments)

    monkeypatch.setattr(running.engine.device, "start", held)
    stream = running.submit([1, 2, 3], "a", max_new_tokens=2, ignore_eos=True)
    assert is_there.wait(60)
    numbers = crossing.numbers()
    assert (numbers.running, numbers.waiting) == (1, 0)
    assert list(numbers.totals.adapters.resident) == ["a"]
    go.set()
    stream.wait(60)


def test_totals_are_whole_with_the_last_chunk(running: AsyncEngine) -> None:
    crossing = Crossing(running)
    crossing.numbers()
    job = running.finetune(DATA, "mine", peft=LORA, **OPTIONS)
    job.wait(60)
    for count, ids in enumerate(prompts((9, 21, 30)), 1):
        running.submit(ids, "a", n=2, max_new_tokens=6, ignore_eos=True).wait(60)
        numbers = crossing.numbers()
        assert numbers.totals.output_tokens == count * 2 * 6
        assert plain(numbers.totals) == plain(running.numbers().totals)
    assert crossing.watched.jobs() == running.jobs()
    came = len(crossing.came)
    running.run(lambda: None)
    assert len(crossing.came) == came  # nothing changed


def test_nothing_is_reported_to_nobody(running: AsyncEngine) -> None:
    crossing = Crossing(running)
    running.submit([1, 2, 3], "a", max_new_tokens=6, ignore_eos=True).wait(60)
    assert crossing.came == []
    assert crossing.numbers().totals.output_tokens == 6


def test_who_stops_asking_is_told_no_more_and_believes_nothing_old() -> None:
    now_s, posted = [100.0], list[Watch]()
    watched = WatchedNumbers(lambda one: posted.append(decoder(Watch)(one)), lambda: now_s[0])

    def report(time_s: float, running: int, **parts: Any) -> Report:
        return Report(time_s, {**STATE, "running": running}, **parts)

    first: dict[str, Any] = {"resident": {}, "waiting": {}, "totals": {"output_tokens": 5}}
    assert watched.numbers() is None
    now_s[0] = 101.0
    assert watched.numbers() is None
    assert posted == []  # who asks now and then has the engine asked
    now_s[0] = 101.5
    assert watched.numbers() is None
    assert watched.jobs() is None
    assert posted == [Watch(105.5, True)]
    watched.take(report(101.6, 1, **first, jobs=[]))
    found = watched.numbers()
    assert found is not None
    assert (found.running, found.totals.output_tokens, watched.jobs()) == (1, 5, [])
    now_s[0] = 103.5
    watched.take(report(103.4, 2))
    found = watched.numbers()
    assert found is not None
    assert (found.running, found.totals.output_tokens) == (2, 5)
    assert posted[1:] == [Watch(107.5, False)]
    now_s[0] = 107.5
    assert watched.jobs() is None
    assert watched.numbers() is None
    now_s[0] = 107.6
    assert watched.numbers() is None
    assert posted[2:] == [Watch(111.6, True)]
    watched.take(report(107.5, 3))
    assert watched.numbers() is None  # it was under way when nobody watched
    watched.take(report(107.7, 4, **first, jobs=[]))
    found = watched.numbers()
    assert found is not None
    assert found.running == 4


STATE: dict[str, Any] = {
    "waiting": 0, "preparing": 0, "running": 0, "waiting_tokens": 0, "jobs": {}, "pages": 9,
    "free_pages": 9, "adapters": 0, "shares_prefixes": True, "late": {},
}  # fmt: skip


def test_what_is_no_report_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        decoder(ToServer)(encode(["report", 1.0, {}, {"a": "many"}]))
