"""The index of prefixes alone: what is found is what was filled, by the same version."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pcg.kernels.sizes import PAGE_TOKENS
from pcg.runtime.memory.pool import PagePool, pages_for
from pcg.runtime.requests.prefixes import Prefixes
from pcg.runtime.requests.request import Request
from pcg.runtime.requests.sequence import Sequence
from pcg.runtime.sampling.sampling_params import SamplingParams
from pcg.simulate.simulated_device import SimulatedAdapter

TOKENS = [[1] * 16, [2] * 16, [1] * 15 + [2], [3] * 7, [0] * 5]
"""Blocks that prompts are put together from, so that many begin alike."""


class Machine(RuleBasedStateMachine):
    """Sequences that find blocks, fill blocks and end, beside a list of what was filled.

    There are pages for all, so that nothing is evicted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(100_000)
        self.prefixes = Prefixes(self.pool)
        self.adapters: list[SimulatedAdapter | None] = [
            None,
            SimulatedAdapter("a", 1),
            SimulatedAdapter("a", 1),
            SimulatedAdapter("p", 1, prompt_tokens=20),
        ]
        self.versions = [0] * len(self.adapters)
        self.filled: set[tuple[int, int, tuple[int, ...]]] = set()
        self.running: list[tuple[Sequence, int, int]] = []
        self.count = 0

    @rule(parts=st.lists(st.sampled_from(TOKENS), min_size=1, max_size=5), place=st.integers(0, 3))
    def begin(self, parts: list[list[int]], place: int) -> None:
        prompt = tuple(token for part in parts for token in part)
        asked = Request(prompt, SamplingParams(max_new_tokens=50), self.adapters[place])
        sequence = Sequence(f"request {self.count}", self.count, asked, limit=50)
        self.count += 1
        self.prefixes.find(sequence)
        self.check_found(sequence, place, self.versions[place], 0)
        if sequence.table is None:
            sequence.table = self.pool.open(sequence.id)
        missing = pages_for(sequence.length) - len(sequence.table.pages)
        self.pool.extend(sequence.table, missing)
        self.running.append((sequence, place, self.versions[place]))

    def check_found(self, sequence: Sequence, place: int, version: int, before: int) -> None:
        """As many blocks as were filled, one after the other, but for the last token."""
        ids, blocks = sequence.ids(0, sequence.length), before // PAGE_TOKENS
        while (end := (blocks + 1) * PAGE_TOKENS) < len(ids):
            if (place, version, tuple(ids[:end])) not in self.filled:
                break
            blocks += 1
        assert sequence.cached == blocks * PAGE_TOKENS

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 50), tokens=st.integers(1, 40), token=st.integers(1, 3))
    def go_on(self, which: int, tokens: int, token: int) -> None:
        sequence, place, version = self.running[which % len(self.running)]
        if sequence.pending > 1:
            before, is_current = sequence.cached, version == self.versions[place]
            self.prefixes.find(sequence)
            assert sequence.cached >= before
            if before % PAGE_TOKENS == 0 and is_current:
                self.check_found(sequence, place, version, before)
        table = sequence.table
        assert table is not None
        count = min(tokens, sequence.pending)
        self.pool.extend(table, max(pages_for(sequence.cached + count) - len(table.pages), 0))
        self.prefixes.keep(sequence, count)
        if version == self.versions[place]:
            self.fill(sequence, place, count)
        sequence.cached += count
        if not sequence.pending:
            sequence.generated.append(token)

    def fill(self, sequence: Sequence, place: int, count: int) -> None:
        """Note blocks; those that wait behind one that it fills as others did come a step later."""
        ids, last = sequence.ids(0, sequence.length), sequence.cached + count
        for end in range(PAGE_TOKENS, last + 1, PAGE_TOKENS):
            block = place, self.versions[place], tuple(ids[:end])
            if block in self.filled and end - PAGE_TOKENS < sequence.cached < end:
                return
            self.filled.add(block)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 50))
    def end(self, which: int) -> None:
        sequence, _, _ = self.running.pop(which % len(self.running))
        assert sequence.table is not None
        self.pool.close(sequence.table)

    @rule(place=st.integers(1, 3))
    def change(self, place: int) -> None:
        adapter = self.adapters[place]
        assert adapter is not None
        self.prefixes.forget(adapter)
        self.versions[place] += 1

    @rule()
    def reset(self) -> None:
        self.running.clear()
        self.pool.reset(())
        self.prefixes.reset()
        self.filled.clear()
        for place in range(len(self.versions)):
            self.versions[place] += 1

    @invariant()
    def is_sound(self) -> None:
        self.prefixes.check_integrity()
        current = {entry for entry in self.filled if entry[1] == self.versions[entry[0]]}
        assert len(self.prefixes) == len(current)
        shared = [sequence.table for sequence, _, _ in self.running]
        assert all(table is not None and table.shared <= len(table.pages) for table in shared)


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestMachine = Machine.TestCase
