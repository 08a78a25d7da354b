"""Requests on their way to the engine's thread: a flood stands before nobody else's."""

from __future__ import annotations

from pcg.runtime.admission.backlog import UNLIMITED, Arrivals, Backlog, QueueLimits
from pcg.runtime.requests.stream import Stream


def make_stream(name: str | None = None) -> Stream:
    return Stream(lambda stream: None, name)


def test_few_of_a_tenant_are_sent_at_once_and_the_others_in_turn() -> None:
    arrivals: Arrivals[int] = Arrivals(Backlog(UNLIMITED))
    flood = [make_stream() for _ in range(20)]
    sent = [turn for turn, stream in enumerate(flood) if arrivals.add("flood", stream, turn)]
    assert sent == list(range(8))
    assert arrivals.add("modest", make_stream(), 20)
    following = [arrivals.taken("flood", stream) for stream in flood]
    assert following == [*range(8, 20), *[None] * 8]
    assert len(arrivals) == 1


def test_requests_without_a_tenant_keep_their_order() -> None:
    arrivals: Arrivals[int] = Arrivals(Backlog(UNLIMITED))
    streams = [make_stream() for _ in range(100)]
    assert all(arrivals.add("", stream, turn) for turn, stream in enumerate(streams))
    assert [arrivals.taken("", stream) for stream in streams] == [None] * 100


def test_one_that_is_on_its_way_is_found_by_its_id() -> None:
    """Whether it was sent or is held back, until the engine has it."""
    arrivals: Arrivals[int] = Arrivals(Backlog(UNLIMITED))
    streams = [make_stream(f"r{turn}") for turn in range(12)]
    for turn, stream in enumerate(streams):
        arrivals.add("flood", stream, turn)
    assert arrivals.find("r11") is streams[11]
    assert arrivals.find("r0") is streams[0]
    assert arrivals.find("r12") is None
    assert arrivals.taken("flood", streams[0]) == 8
    assert arrivals.find("r0") is None
    assert arrivals.clear() == streams[9:]
    assert len(arrivals) == 0


def test_what_is_on_its_way_counts_with_what_waits() -> None:
    arrivals: Arrivals[int] = Arrivals(Backlog(QueueLimits(tenant_requests=3)))
    for turn in range(3):
        assert arrivals.why_full("flood") is None
        arrivals.add("flood", make_stream(), turn)
    assert "3 requests wait or came" in str(arrivals.why_full("flood"))
    assert arrivals.why_full("modest") is None
    assert len(arrivals.clear()) == 0
    assert arrivals.why_full("flood") is None
