"""What the rows of a simulated engine's cache would hold, and that sequences read their own."""

from __future__ import annotations

from collections.abc import Sequence as List
from typing import Any

from pcg.kernels.sizes import PAGE_TOKENS
from pcg.runtime.engine.device.device import Launched
from pcg.runtime.requests.sequence import Sequence
from pcg.simulate.simulated_engine import SimulatedEngine


class RowContents:
    """Stands before an engine's device: writes the rows of each step, then reads as attention does.

    A row's content stands for all that its keys and values depend on: the version of the adapter,
    and the tokens up to its own. Rows that nobody keeps hold nothing.

    Attributes:
        fails: whether the device breaks down in the midst of a step.
        wrong: what was wrong with a step; the engine would drop its requests and go on.
    """

    class Failure(Exception):
        """The device broke down."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self.fails = False
        self.wrong: AssertionError | None = None
        self._engine = engine
        self._start = engine.device.start
        self._pages: dict[int, list[int]] = {}
        self._expected: dict[str, list[int]] = {}
        self._adapters: dict[int, object] = {}
        engine.device.start = self.start  # type: ignore[method-assign]

    def start(self, chunks: List[tuple[Sequence, int]], windows: Any) -> Launched:
        try:
            self._check(chunks)
        except AssertionError as error:
            self.wrong = self.wrong or error
        return self._start(chunks, windows)

    def _check(self, chunks: List[tuple[Sequence, int]]) -> None:
        """Write the rows of a step, and see that every sequence reads what it wrote."""
        self._lose_what_nobody_keeps()
        written: set[int] = set()
        for sequence, count in chunks:
            assert sequence.table is not None
            expected = self._contents(sequence)
            for place in range(sequence.cached, sequence.cached + count):
                row = sequence.table.rows(place, place + 1)[0]
                assert row not in written, "two sequences write a row"
                written.add(row)
                self._pages[row // PAGE_TOKENS][row % PAGE_TOKENS] = expected[place]
            if self.fails:
                raise self.Failure
        for sequence, count in chunks:
            end = sequence.cached + count
            assert sequence.table is not None
            expected = self._contents(sequence)[:end]
            found = [row for page in sequence.table.pages for row in self._pages[page]]
            assert found[:end] == expected, f"{sequence.id} reads rows of others"

    def _lose_what_nobody_keeps(self) -> None:
        pool = self._engine.pool
        kept = set(pool.shared)
        for sequence in self._engine.scheduler.running:
            assert sequence.table is not None
            kept |= set(sequence.table.pages)
        for page in range(pool.size):
            if page not in kept or page not in self._pages:
                self._pages[page] = [0] * PAGE_TOKENS

    def _contents(self, sequence: Sequence) -> list[int]:
        """Of each of its tokens."""
        adapter = sequence.request.adapter
        self._adapters[id(adapter)] = adapter  # so that no other gets its id
        found = self._expected.setdefault(sequence.id, [])
        for token in sequence.ids(len(found), sequence.length):
            found.append(hash((found[-1] if found else id(adapter), token)))
        return found
