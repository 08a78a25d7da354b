"""Recorded decode steps give what eager ones give: see `tests/support/interpreter/tape.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import pcg.compiler as compiler
from pcg.kernels.adapter_batch import NO_SLOT, AdapterSlot
from pcg.kernels.batch import DecodeTokens, Span
from pcg.kernels.sizes import PAGE_TOKENS
from pcg.kernels.triton.adapters.token_tiles import DECODE_BLOCK, token_tiles
from pcg.kernels.triton.attention.decode_lists import DecodeCapacity, DecodeLists, decode_room
from pcg.kernels.triton.attention.work import AttentionWork
from pcg.runtime.engine.limits import Limits
from pcg.runtime.memory.pool import PageTable
from pcg.runtime.model import decode_graphs
from pcg.runtime.requests.request import Request
from pcg.runtime.sampling.sampling_params import SamplingParams
from tests.support import oracle
from tests.support.decode_steps import RANKS, Step, Steps, add_lora, executor_of
from tests.support.families import BY_NAME, VOCABULARY
from tests.support.interpreter import bf16
from tests.support.interpreter.tape import Tape
from tests.support.prompts import prompts

bf16.install()
CPU = torch.device("cpu")
EXECUTOR = executor_of(1, "cpu")
SLOTS = (NO_SLOT, AdapterSlot(0, 0, 16), AdapterSlot(2, 64, 16), AdapterSlot(3, 640, 48))
TAPE = Tape()
STEPS = Steps(EXECUTOR, TAPE)


def check(steps: Steps, step: Step) -> None:
    expected, found = steps.both(step)
    assert found is not None
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


# ----------------------------------------------------------------------------------------- lists


def filled_anew(tokens: DecodeTokens, room: DecodeCapacity) -> tuple[torch.Tensor, torch.Tensor]:
    """The lists as a batch that is not recorded has them, in that room."""
    columns = zip(tokens.contexts, tokens.tables, strict=True)
    parts = [Span(i, 1, context, table) for i, (context, table) in enumerate(columns)]
    spans = [(i, 1, slot) for i, slot in enumerate(tokens.slots)]
    tiles = token_tiles(spans, DECODE_BLOCK, room.by_adapter)
    return AttentionWork.build(parts, 1, CPU, capacity=room.attention).flat, tiles.memory


@given(data=st.data())
def test_lists_are_those_of_a_batch(data: st.DataObject) -> None:
    """However tables have grown, changed and moved in the batch since they were filled last."""
    free = iter(range(10**6))
    lists: dict[DecodeCapacity, DecodeLists] = {}

    def table() -> PageTable:
        found = PageTable("some sequence")
        found.take(next(free))
        return found

    tables = [table() for _ in range(data.draw(st.integers(1, 20)))]
    for _ in range(4):
        for one in tables:
            for _ in range(data.draw(st.sampled_from([0, 0, 1, 70]))):
                one.take(next(free))
            if data.draw(st.booleans()):
                one.replace(data.draw(st.integers(0, len(one.pages) - 1)), next(free))
        tables = data.draw(st.permutations(tables))[: data.draw(st.integers(1, len(tables)))]
        contexts = [
            PAGE_TOKENS * len(one.pages) - data.draw(st.integers(1, PAGE_TOKENS)) for one in tables
        ]
        slots = [data.draw(st.sampled_from(SLOTS)) for _ in tables]
        tokens = DecodeTokens([7] * len(tables), contexts, tables, slots)
        room = decode_room(tokens)
        assert room is not None
        if room not in lists:
            lists[room] = DecodeLists(room, CPU)
        ours = lists[room]
        ours.fill(tokens)
        count = len(tables)
        assert ours.input_ids.tolist() == [7] * count + [0] * (room.tokens - count)
        assert ours.positions[:count].tolist() == contexts
        rows = [one.row(context) for one, context in zip(tables, contexts, strict=True)]
        assert ours.rows.tolist() == rows + [-1] * (room.tokens - count)
        flat, tiles = filled_anew(tokens, room)
        work = AttentionWork.of(flat, room.attention)
        for name in ("parts", "splits", "decodes"):
            assert torch.equal(getattr(ours.attention, name), getattr(work, name)), name
        for row, one in zip(ours.attention.pages, tables, strict=False):
            assert row[: len(one.pages)].tolist() == one.pages
        assert (ours.tiles is None) == (set(slots) == {NO_SLOT})
        if ours.tiles is not None:
            assert torch.equal(ours.tiles.memory, tiles)


def tokens_of(contexts: list[int], slots: Sequence[AdapterSlot]) -> DecodeTokens:
    tables = []
    for context in contexts:
        tables.append(PageTable("some sequence"))
        for page in range(context // PAGE_TOKENS + 1):
            tables[-1].take(page)
    return DecodeTokens([0] * len(contexts), contexts, tables, slots)


def test_rooms_are_rounded_up() -> None:
    narrow = [AdapterSlot(number, 0, 16) for number in range(256)]
    wide = AdapterSlot(256, 0, 256)
    assert decode_room(tokens_of([5], [NO_SLOT])) == DecodeCapacity(1, 64, 1, 0, 0, 0)
    assert decode_room(tokens_of([5] * 3, narrow[:3])) == DecodeCapacity(4, 64, 4, 4, 0, 64)
    many = tokens_of([1100] * 17, narrow[:1] * 17)
    assert decode_room(many) == DecodeCapacity(24, 256, 96, 2, 0, 384)
    # A wide adapter adds its own blocks of ranks to the others' tiles, and its own sums.
    few = tokens_of([5] * 3, [*narrow[:2], wide])
    assert decode_room(few) == DecodeCapacity(4, 64, 4, 4, 16, 512)
    assert decode_room(tokens_of([5] * 256, narrow)) == DecodeCapacity(256, 64, 256, 256, 0, 4096)
    assert decode_room(tokens_of([5] * 257, narrow[:1] * 257)) is None


# ----------------------------------------------------------------------------------------- steps


def steps_of(count: int) -> st.SearchStrategy[Step]:
    """Return a strategy of decode steps with so many tokens."""

    def lists(values: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
        return st.lists(values, min_size=count, max_size=count)

    adapters = lists(st.sampled_from([None, *RANKS])) | st.just([None] * count)
    ids = lists(st.integers(0, VOCABULARY - 1))
    return st.builds(Step, ids, lists(st.integers(0, 70)), adapters)


@settings(max_examples=4)
@example(Step([5, 6, 7], [3, 30, 17], [None, "r4", "r20"]))
@example(Step([9, 8, 5, 1], [16, 0, 47, 15], ["r20", "r1", None, "r20"]))
@given(step=st.integers(3, 4).flatmap(steps_of))
def test_any_batch_of_a_room_is_replayed(step: Step) -> None:
    """Batches of other sizes, contexts and adapters than the one that was recorded."""
    check(STEPS, step)
    assert TAPE.recorded == STEPS.graphs.recorded <= 4  # of none, 1, 2 and 4 tiles
    assert TAPE.replayed == STEPS.graphs.replayed


def test_many_splits() -> None:
    """Replayed steps have other sequences than the recorded one, with more splits."""
    tape = Tape()
    steps = Steps(EXECUTOR, tape, pages=70)
    for contexts in ([530, 3], [40, 1000]):
        check(steps, Step([5, 9], contexts, [None, None]))
    assert (tape.recorded, tape.replayed) == (1, 2)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "gemma2" else pytest.mark.slow) for name in BY_NAME],
)
def test_families(name: str) -> None:
    """None of them has an operator that asks the host."""
    config = BY_NAME[name].config(2)
    if config.get("head_dim") == 24:  # no size of the kernels
        config["head_dim"] = 32
    executor = compiler.compile(oracle.random_model(config), backend="triton")
    steps = Steps(executor, Tape())
    for contexts in ([3, 17], [30, 0]):
        check(steps, Step([5, 9], contexts, [None, None]))


@pytest.mark.slow
def test_adapters_that_come_to_lie_elsewhere_are_recorded_anew() -> None:
    executor = executor_of(1, "cpu")
    tape = Tape()
    steps = Steps(executor, tape)
    check(steps, Step([5], [20], ["r4"]))
    check(steps, Step([6], [30], ["r20"]))  # the tables grow with the rank
    assert (tape.recorded, tape.replayed) == (2, 2)
    check(steps, Step([7], [3], ["r4"]))
    assert (tape.recorded, tape.replayed) == (2, 3)
    check(steps, Step([7], [3], [None]))
    add_lora(executor, "wide", 33)
    check(steps, Step([7], [3], ["wide"]))
    assert (tape.recorded, tape.replayed) == (4, 5)
    check(steps, Step([7], [3], [None]))  # reads no adapters
    assert (tape.recorded, tape.replayed) == (4, 6)


def test_virtual_tokens_are_in_the_cache() -> None:
    steps = Steps(EXECUTOR, Tape())
    check(steps, Step([5, 6, 7], [20, 3, 9], ["prompt", "r4", "prefix"]))


def test_what_no_graph_serves() -> None:
    tape = Tape()
    steps = Steps(EXECUTOR, tape, eager_steps=1)
    assert steps.both(Step([5], [3], [None]))[1] is None  # the first of its room
    assert steps.both(Step([5], [3], ["ia3"]))[1] is None
    check(steps, Step([5], [3], [None]))
    assert steps.both(Step([5], [3], ["ia3"]))[1] is None
    steps.graphs.recorder = None
    assert steps.both(Step([5], [3], [None]))[1] is None
    assert (tape.recorded, tape.replayed) == (1, 1)


class Refusing:
    """A device that does not record."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing")


def test_where_nothing_is_recorded_steps_run_without() -> None:
    steps = Steps(EXECUTOR, Refusing())
    with pytest.warns(UserWarning, match="could not be recorded as a CUDA graph.*not permitted"):
        assert steps.both(Step([5], [3], [None]))[1] is None
    assert steps.both(Step([5], [3], ["r4"]))[1] is None
    assert (steps.graphs.recorded, steps.graphs.replayed) == (0, 0)


def test_the_latest_graphs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_graphs, "MOST_GRAPHS", 1)
    tape = Tape()
    steps = Steps(EXECUTOR, tape)
    for ids, recorded in (([5], 1), ([7], 1), ([5, 6], 2), ([5], 3)):
        check(steps, Step(ids, [3] * len(ids), [None] * len(ids)))
        assert tape.recorded == recorded


def test_the_tape_replays_what_lies_in_memory_and_waits_for_nothing() -> None:
    kept, scale = torch.ones(3), [2.0]
    out = torch.empty(3)

    def run() -> None:
        torch.add(torch.empty(3).copy_(kept).mul_(scale[0])[1:].sum(), kept, out=out)

    replay = Tape().record(run)
    kept.copy_(torch.tensor([1.0, 2.0, 3.0]))
    scale[0] = 100.0
    replay()
    assert out.tolist() == [11.0, 12.0, 13.0]  # by the number that was recorded
    for waits in (lambda: kept.sum().item(), lambda: torch.tensor([1, 2])):
        with pytest.raises(RuntimeError, match="waits for the device while a step is recorded"):
            Tape().record(waits)


# ---------------------------------------------------------------------------------------- engine


def served(backend: str) -> tuple[list[list[int]], Any]:
    """Tokens of requests of several adapters, and the graphs that ran."""
    base = oracle.random_model(BY_NAME["llama3"].config(1))
    executor = compiler.compile(base, backend=backend)
    for name, rank in RANKS.items():
        add_lora(executor, name, rank)
    engine = executor.engine(Limits(tokens=24, least_chunk=4), kv_cache_bytes=2**21)
    names = (None, "r4", "r20")
    for i, (ids, name) in enumerate(zip(prompts((5, 14, 3)), names, strict=True)):
        drawn = {"temperature": 0.7, "top_k": 20, "seed": 5} if i == 1 else {}
        params = SamplingParams(max_new_tokens=4 - i, ignore_eos=True, **drawn)
        adapter = None if name is None else executor.adapters[name]
        engine.submit(Request(tuple(ids), params, adapter))
    tokens: list[list[int]] = [[] for _ in names]
    while not engine.is_idle:
        for chunk in engine.step():
            assert chunk.token_id is not None
            tokens[chunk.index].append(chunk.token_id)
    return tokens, engine.device.graphs


def test_an_engine_replays_its_decode_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_graphs, "recorder_for", lambda device: Tape())
    monkeypatch.setattr(decode_graphs, "EAGER_STEPS", 0)
    tokens, graphs = served("triton")
    expected, none = served("torch")
    assert tokens == expected
    assert none is None
    assert graphs.replayed == 3  # of four steps one has prompts
    assert graphs.recorded == 3  # of 3, 2 and 1 sequences
