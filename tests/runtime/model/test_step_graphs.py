"""Recorded steps give what eager ones give: see `tests/support/interpreter/tape.py`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import pcg.compiler as compiler
from pcg.kernels.batch import NO_SLOT, AdapterSlot, Span, StepTokens
from pcg.kernels.sizes import PAGE_TOKENS
from pcg.kernels.triton.adapters.token_tiles import DECODE_BLOCK, TileCapacity, token_tiles
from pcg.kernels.triton.attention.work import AttentionWork
from pcg.kernels.triton.step_lists import StepLists, sizes_of
from pcg.kernels.triton.step_rooms import MIXED_TOKENS, StepRoom, StepRooms, StepSizes
from pcg.runtime.admission.limits import Limits
from pcg.runtime.memory.pool import PageTable
from pcg.runtime.model import step_graphs
from pcg.runtime.requests.request import Request
from pcg.runtime.sampling.sampling_params import SamplingParams
from tests.support import oracle
from tests.support.families import BY_NAME, VOCABULARY
from tests.support.interpreter import bf16
from tests.support.interpreter.tape import Tape
from tests.support.prompts import prompts
from tests.support.recorded_steps import RANKS, Step, Steps, add_lora, executor_of

bf16.install()
CPU = torch.device("cpu")
EXECUTOR = executor_of(1, "cpu")
TAPE = Tape()
STEPS = Steps(EXECUTOR, TAPE)


def check(steps: Steps, step: Step) -> None:
    expected, found = steps.both(step)
    assert found is not None
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


# ----------------------------------------------------------------------------------------- lists

GROUP = 2


def filled_anew(
    tokens: StepTokens, room: StepRoom
) -> tuple[AttentionWork, torch.Tensor, torch.Tensor]:
    """The lists as a batch that is not recorded has them, in that room."""
    columns = zip(tokens.lengths, tokens.contexts, tokens.tables, strict=True)
    starts = accumulate(tokens.lengths, initial=0)
    parts = [Span(start, *one) for start, one in zip(starts, columns, strict=False)]
    spans = [(p.start, p.length, slot) for p, slot in zip(parts, tokens.slots, strict=True)]
    read = () if room.decodes else tokens.read
    of_rows = [(i, 1, tokens.slots[place]) for i, place in enumerate(read)]
    work = AttentionWork.build(parts, GROUP, CPU, capacity=room.attention(PAGES))
    tiles = token_tiles(spans, room.block, room.by_adapter).memory
    return work, tiles, token_tiles(of_rows, DECODE_BLOCK, room.rows_by_adapter).memory


SLOTS = (NO_SLOT, AdapterSlot(0, 0, 16), AdapterSlot(2, 64, 16), AdapterSlot(3, 640, 48))
PAGES = 300
ROOMS = StepRooms(20, 300, PAGES, 10**6, GROUP, has_adapters=True)


@given(data=st.data())
def test_lists_are_those_of_a_batch(data: st.DataObject) -> None:
    """However tables have grown, changed and moved in the batch since they were filled last."""
    free = iter(range(10**6))
    lists = StepLists(ROOMS.largest, PAGES, GROUP, CPU)

    def table() -> PageTable:
        found = PageTable("some sequence")
        found.append(next(free))
        return found

    tables = [table() for _ in range(data.draw(st.integers(1, 20)))]
    for _ in range(4):
        for one in tables:
            for _ in range(data.draw(st.sampled_from([0, 0, 1, 70]))):
                one.append(next(free))
            if data.draw(st.booleans()):
                one.replace(data.draw(st.integers(0, len(one.pages) - 1)), next(free))
        tables = data.draw(st.permutations(tables))[: data.draw(st.integers(1, len(tables)))]
        count = len(tables)
        ends = [PAGE_TOKENS * len(one.pages) for one in tables]
        ends = [end - data.draw(st.integers(0, PAGE_TOKENS - 1)) for end in ends]
        longest = data.draw(st.sampled_from([1, 2, 40]))
        lengths = [data.draw(st.integers(1, min(longest, end))) for end in ends]
        lengths = lengths if sum(lengths) <= ROOMS.tokens else [1] * count
        contexts = [end - length for end, length in zip(ends, lengths, strict=True)]
        slots = [data.draw(st.sampled_from(SLOTS)) for _ in tables]
        read = [i for i in range(count) if lengths[i] == 1 or data.draw(st.booleans())]
        tokens = StepTokens([7] * sum(lengths), lengths, contexts, tables, slots, read)
        room = ROOMS.of(sizes_of(tokens))
        assert room is not None
        assert room.decodes == (max(lengths) == 1)
        lists.fill(tokens, room)
        ours, total = lists.of(room), sum(lengths)
        assert ours.input_ids.tolist() == [7] * total + [0] * (room.tokens - total)
        places = [
            (t, c + i) for t, c, n in zip(tables, contexts, lengths, strict=True) for i in range(n)
        ]
        assert ours.positions[:total].tolist() == [position for _, position in places]
        rows = [one.rows(position, position + 1)[0] for one, position in places]
        assert ours.rows.tolist() == rows + [-1] * (room.tokens - total)
        if not room.decodes:
            last = [end - 1 for end in accumulate(lengths)]
            chosen = [last[place] for place in read]
            assert ours.read.tolist() == chosen + [0] * (room.sequences - len(read))
        work, tiles, row_tiles = filled_anew(tokens, room)
        for name in ("parts", "tiles", "splits", "decodes"):
            assert torch.equal(getattr(ours.attention, name), getattr(work, name)), name
        for row, one in zip(ours.attention.pages, tables, strict=False):
            assert row[: len(one.pages)].tolist() == one.pages
        assert (ours.tiles is None) == (set(slots) == {NO_SLOT})
        if ours.tiles is not None:
            assert torch.equal(ours.tiles.memory, tiles)
            assert (ours.row_tiles is None) == room.decodes
        if ours.row_tiles is not None:
            assert torch.equal(ours.row_tiles.memory, row_tiles)


def room_of(
    lengths: list[int], contexts: list[int], adapter_tiles: int = 0, widest: int = 0, wide: int = 0
) -> StepRoom | None:
    rooms = StepRooms(512, 4096, 600, 10**6, 4, has_adapters=True)
    return rooms.of(StepSizes(lengths, contexts, adapter_tiles, widest, wide))


def test_rooms_are_rounded_up() -> None:
    assert room_of([1], [5]) == StepRoom(1, 1, 1, 0, 0, 0, 0)
    assert room_of([1] * 3, [5] * 3, 3) == StepRoom(4, 4, 4, 0, 4, 0, 0)
    # A wide adapter adds its own blocks of ranks to the others' tiles, and its own sums.
    room = room_of([1] * 3, [5] * 3, 3, 9, 9)
    assert room == StepRoom(4, 4, 4, 0, 4, 15, 16)
    assert room.by_adapter == TileCapacity(4, 0, 0, 4, 16, 4, 16 * (4 + 16))
    assert room_of([1] * 17, [1100] * 17, 2) == StepRoom(24, 24, 96, 0, 4, 0, 0)
    assert room_of([1] * 256, [5] * 256, 256) == StepRoom(256, 256, 256, 0, 256, 0, 0)
    # 512 tokens of 4 heads a KV head are 16 tiles, and each sequence may have one that is not full.
    assert room_of([500], [0]) == StepRoom(512, 16, 16, 32, 0, 0, 0)
    assert room_of([1] * 17 + [800], [900] * 18, 5) == StepRoom(832, 256, 256, 282, 269, 0, 0)
    room = room_of([1] * 17 + [800], [900] * 18, 5, 9, 9 * 800)  # of rank 160
    assert room == StepRoom(832, 256, 256, 282, 269, 15, 0)
    assert room.by_adapter == TileCapacity(832, 0, 0, 269, 3 * 269, 0, 832 * 256)
    assert room_of([1] * 257, [5] * 257) == StepRoom(320, 512, 512, 522, 0, 0, 0)
    assert room_of([4097], [0]) is None


@given(data=st.data())
def test_every_step_has_a_warm_room(data: st.DataObject) -> None:
    """One of those that are recorded before the first request holds any step within the limits."""
    sequences, tokens = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 5000))
    pages, pool = data.draw(st.integers(1, 9000)), data.draw(st.integers(1, 20000))
    widest = data.draw(st.sampled_from([16, 48, 256]))
    rooms = StepRooms(sequences, tokens, min(pages, pool), pool, 4, True, widest)
    left, count = tokens, data.draw(st.integers(1, min(sequences, tokens)))
    lengths, contexts, free = [], [], pool * PAGE_TOKENS
    for i in range(count):
        most = min(left - (count - i - 1), data.draw(st.sampled_from([1, 1, 1, 50, 5000])))
        context = data.draw(st.integers(0, min(pages, pool) * PAGE_TOKENS - 1))
        length = data.draw(st.integers(1, max(1, min(most, pages * PAGE_TOKENS - context))))
        if context + length > free:
            break
        left, free = left - length, free - context - length
        lengths.append(length)
        contexts.append(context)
    if not lengths:
        return
    more = [data.draw(st.sampled_from([0, widest // 16 - 1])) for _ in lengths]
    wide = sum(n * blocks for n, blocks in zip(lengths, more, strict=True))
    sizes = data.draw(st.sampled_from([(0,), (len(lengths), max(more), wide)]))
    own = rooms.of(StepSizes(lengths, contexts, *sizes))
    if own is None:
        assert sum(lengths) > MIXED_TOKENS[-1]
        return
    holding = min((room for room in rooms.all if room.holds(own)), default=None)
    assert holding is not None
    assert holding.tokens == own.tokens


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
    # Of none, 1, 2 and 4 tiles, and of these with r20 among them.
    assert TAPE.recorded == STEPS.graphs.recorded <= 7
    assert TAPE.replayed == STEPS.graphs.replayed


MIXED = (
    Step([[5, 6, 7, 8], 9, list(range(3, 20))], [3, 30, 0], [None, "r4", "r20"], [1, 2]),
    Step([list(range(3, 30))], [16], ["r1"], []),
    Step([8, [7, 9], 3, 4, [5, 1, 2]], [30, 0, 47, 0, 15], [None, "r20", "r4", "r20", None]),
)
"""Prompts beside sequences that decode, of which some end and some do not, and one alone."""


def test_prompts_are_replayed_beside_tokens_that_decode() -> None:
    tape = Tape()
    steps = Steps(EXECUTOR, tape, limits=(5, 32))
    for step in MIXED:
        check(steps, step)
    assert (tape.recorded, tape.replayed) == (3, 3)  # of 32 tokens, of 32 without r20, of 16


def test_many_splits() -> None:
    """Replayed steps have other sequences than the recorded one, with more splits."""
    tape = Tape()
    steps = Steps(EXECUTOR, tape, pages=70)
    for contexts in ([530, 3], [40, 1000]):
        check(steps, Step([5, 9], contexts, [None, None]))
    assert (tape.recorded, tape.replayed) == (1, 2)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "gemma2" else pytest.mark.slow)
        for name, family in BY_NAME.items()
        if family.linear == "all-linear"
    ],
)
def test_families(name: str) -> None:
    """None of them has an operator that asks the host; those with experts are not recorded."""
    config = BY_NAME[name].config(2)
    if config.get("head_dim") == 24:  # no size of the kernels
        config["head_dim"] = 32
    executor = compiler.compile(oracle.random_model(config), backend="triton")
    steps = Steps(executor, Tape())
    for contexts in ([3, 17], [30, 0]):
        check(steps, Step([5, 9], contexts, [None, None]))
        check(steps, Step([5, [9, 4, 7]], contexts, [None, None]))


@pytest.mark.slow
def test_adapters_that_come_to_lie_elsewhere_are_recorded_anew() -> None:
    executor = executor_of(1, "cpu")
    tape = Tape()
    steps = Steps(executor, tape)
    check(steps, Step([5], [20], ["r4"]))
    check(steps, Step([6], [30], ["r20"]))  # a room of its own
    assert (tape.recorded, tape.replayed) == (2, 2)
    check(steps, Step([7], [3], ["r4"]))
    assert (tape.recorded, tape.replayed) == (2, 3)
    check(steps, Step([7], [3], [None]))
    add_lora(executor, "wide", 200)  # the memory of rows, which is no page's here, grows
    check(steps, Step([7], [3], ["wide"]))
    assert (tape.recorded, tape.replayed) == (4, 5)
    check(steps, Step([7], [3], [None]))  # reads no adapters
    assert (tape.recorded, tape.replayed) == (4, 6)
    check(steps, Step([7], [3], ["r4"]))
    assert (tape.recorded, tape.replayed) == (5, 7)


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


class Refusing(Tape):
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
    monkeypatch.setattr(step_graphs, "MOST_GRAPHS", 1)
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
    monkeypatch.setattr(step_graphs, "recorder_for", lambda device: Tape())
    monkeypatch.setattr(step_graphs, "EAGER_STEPS", 0)
    tokens, graphs = served("triton")
    expected, none = served("torch")
    assert tokens == expected
    assert none is None
    assert graphs.replayed == 4
    assert graphs.recorded == 4  # of prompts, and of 3, 2 and 1 sequences


def test_a_warm_engine_records_nothing_for_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever comes is replayed in one of the rooms that were recorded when it was made."""
    tape = Tape()
    monkeypatch.setattr(step_graphs, "recorder_for", lambda device: tape)
    limits = Limits(running=2, tokens=16, least_chunk=4)
    engine = EXECUTOR.engine(limits, kv_cache_bytes=2**21, warm_up=True)
    graphs = engine.device.graphs
    assert graphs is not None
    assert tape.recorded == graphs.recorded == len(graphs.rooms.all)
    assert engine.device.warmed is not None
    assert engine.device.warmed.graphs == tape.recorded
    assert not graphs.eager
    steps = 0
    for name, ids in zip([None, "r4", "r20", "r1", None], prompts((5, 21, 3, 1, 9)), strict=True):
        engine.submit(EXECUTOR.request(ids, name, max_new_tokens=3, ignore_eos=True))
    while not engine.is_idle:
        assert all(chunk.error is None for chunk in engine.step())
        steps += 1
    assert tape.replayed == graphs.replayed == steps
    assert tape.recorded == len(graphs.rooms.all)
    assert not graphs.eager
