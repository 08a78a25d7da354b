"""The event log: what was added is there, in order, up to as many as are kept."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pcg.runtime.metrics.events import Event, EventLog, Kind


@given(
    st.none() | st.integers(0, 12),
    st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=20),
)
def test_tokens_held_together_are_events_of_their_own(
    kept: int | None, additions: list[tuple[bool, int]]
) -> None:
    log, heard, expected = EventLog(kept), list[Event](), list[Event]()
    log.listen(heard.append)
    for step, (are_tokens, count) in enumerate(additions):
        names = [f"request {i}" for i in range(count)]
        if are_tokens:
            log.add_tokens(float(step), names)
            added = [Event(float(step), Kind.TOKEN, name, {"count": 1}) for name in names]
        else:
            added = [Event(float(step), Kind.ADMITTED, name) for name in names]
            log.add(*added)
        expected += added
        latest = expected if kept is None else expected[max(len(expected) - kept, 0) :]
        assert list(log) == latest
        assert len(log) == len(latest)
        assert log.of("request 1") == tuple(e for e in latest if e.subject == "request 1")
        assert heard == expected
