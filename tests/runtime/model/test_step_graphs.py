"""Recorded steps give what eager ones give: see `tests/support/interpreter/tape.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pcg.kernels.batch import NO_SLOT, AdapterSlot, Span, StepTokens
from pcg.kernels.sizes import PAGE_TOKENS
from pcg.kernels.triton.adapters.token_tiles import DECODE_BLOCK, token_tiles
from pcg.kernels.triton.attention.work import AttentionWork
from pcg.kernels.triton.step_lists import StepLists, sizes_of
from pcg.kernels.triton.step_rooms import MIXED_TOKENS, StepRoom, StepRooms, StepSizes
from pcg.runtime.admission.limits import Limits
from pcg.runtime.engine.device.device import SideStream
from pcg.runtime.memory.pool import PageTable
from pcg.runtime.model import step_graphs
from pcg.runtime.model.step_graphs import CudaRecorder
from tests.support import compiled, oracle
from tests.support.families import BY_NAME, VOCABULARY
from tests.support.interpreter import bf16
from tests.support.interpreter.late_kernels import late_kernels
from tests.support.interpreter.stand_in import tensors_on_cuda
from tests.support.interpreter.streams import ORDER
from tests.support.interpreter.tape import Tape
from tests.support.prompts import prompts
from tests.support.recorded_steps import RANKS, Step, Steps, executor_of

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


@pytest.mark.slow
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


@pytest.mark.slow
def test_prompts_are_replayed_beside_tokens_that_decode() -> None:
    tape = Tape()
    steps = Steps(EXECUTOR, tape, limits=(5, 32))
    for step in MIXED:
        check(steps, step)
    assert (tape.recorded, tape.replayed) == (3, 3)  # of 32 tokens, of 32 without r20, of 16


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name, family in BY_NAME.items() if "experts" not in str(family.fields)]
)
def test_families(name: str) -> None:
    """None of them has an operator that asks the host; those with experts are not recorded."""
    config = BY_NAME[name].config(2)
    if config.get("head_dim") == 24:  # no size of the kernels
        config["head_dim"] = 32
    executor = compiled.executor(oracle.random_model(config), backend="triton")
    steps = Steps(executor, Tape())
    for contexts in ([3, 17], [30, 0]):
        check(steps, Step([5, 9], contexts, [None, None]))
        check(steps, Step([5, [9, 4, 7]], contexts, [None, None]))


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


# ---------------------------------------------------------------------------------------- engine


@pytest.mark.slow
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


# ------------------------------------------------------------------------------------- late kernels


@pytest.mark.slow
def test_a_warm_engine_compiles_nothing_for_requests() -> None:
    """Of a mixed load: prompts, adapters of several ranks, ways to choose tokens."""
    found = late_kernels()
    assert found["warm"] > 10
    assert found["replayed"] > 12
    assert found["eager"] == {}
    assert found["kernels"] == {}
    assert found["late"] == {"kernels": 0, "steps": 0}


# ------------------------------------------------------------------------------ recorders of a gpu

GPU = torch.device("cuda", 0)


@pytest.fixture
def gpu() -> Iterator[None]:
    with tensors_on_cuda():
        yield


def ones(count: int = 4) -> Tensor:
    return torch.ones(count, count, device=GPU)


def doubled(x: Tensor, to: Tensor) -> Callable[[], None]:
    """A function that recorders take: twice x, by a product and an intermediate result."""
    two = torch.eye(len(x), device=GPU) * 2
    return lambda: to.copy_((x + 0) @ two)  # type: ignore[return-value]


@pytest.mark.usefixtures("gpu")
def test_recording_waits_for_nothing_and_frees_nothing() -> None:
    x, to = ones(), torch.zeros(4, 4, device=GPU)
    run = doubled(x, to)
    waits = len(ORDER.waits)
    torch.cuda.set_sync_debug_mode("error")
    again = CudaRecorder(GPU).record(run)
    x.fill_(3)
    again()
    torch.cuda.set_sync_debug_mode("default")
    assert len(ORDER.waits) == waits
    assert to.tolist() == [[6.0] * 4] * 4


@pytest.mark.usefixtures("gpu")
def test_graphs_on_two_streams_share_no_workspace() -> None:
    """A step's graph beside one of a job: products of both write a workspace of their own."""
    places = [torch.zeros(4, 4, device=GPU) for _ in range(2)]
    runs = [doubled(ones(), to) for to in places]
    step, job = (CudaRecorder(GPU).record(run) for run in runs)
    side = SideStream(GPU)
    ones() @ ones()  # an eager one has made a workspace, too
    side.begin()
    step()
    with side.beside():
        job()
    side.rejoin()
    assert [to.tolist() for to in places] == [[[2.0] * 4] * 4] * 2


@pytest.mark.usefixtures("gpu")
def test_where_memory_is_short_what_is_cached_is_given_back_once() -> None:
    to, calls = torch.zeros(4, 4, device=GPU), list[bool]()
    double = doubled(ones(), to)

    def run() -> None:
        calls.append(torch.cuda.is_current_stream_capturing())
        double()
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")

    waits = len(ORDER.waits)
    again = CudaRecorder(GPU).record(run)
    assert calls == [False, True, True]
    assert len(ORDER.waits) > waits
    again()
    assert to.tolist() == [[2.0] * 4] * 4


@pytest.mark.usefixtures("gpu")
def test_a_capture_that_fails_leaves_the_stream_free() -> None:
    x, to = ones(), torch.zeros(4, 4, device=GPU)

    def run() -> None:
        to.copy_(x)
        if torch.cuda.is_current_stream_capturing():
            raise ValueError("an operator that cannot be captured")

    recorder = CudaRecorder(GPU)
    with pytest.raises(ValueError, match="cannot be captured"):
        recorder.record(run)
    run_again = doubled(x, to)
    recorder.record(run_again)()
    assert to.tolist() == [[2.0] * 4] * 4
