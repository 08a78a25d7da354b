"""Recorders of a GPU: their streams, their memory, and that recording stops nothing.

See `tests/support/interpreter/stand_in.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from pcg.runtime.adapters.padded_tables import AdapterCopies
from pcg.runtime.engine.device.device import SideStream
from pcg.runtime.model.step_graphs import CudaRecorder
from tests.support.interpreter.stand_in import tensors_on_cuda
from tests.support.interpreter.streams import ORDER

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _gpu() -> Iterator[None]:
    with tensors_on_cuda():
        yield


def ones(count: int = 4) -> Tensor:
    return torch.ones(count, count, device=GPU)


def doubled(x: Tensor, to: Tensor) -> Callable[[], None]:
    """A function that recorders take: twice x, by a product and an intermediate result."""
    two = torch.eye(len(x), device=GPU) * 2
    return lambda: to.copy_((x + 0) @ two)  # type: ignore[return-value]


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


def test_one_stream_captures_and_nothing_else_runs_there() -> None:
    """However many there are of what has a stream, with adapters copied during a capture."""
    dealt, x = ORDER.dealt, ones()
    copies = [AdapterCopies(GPU) for _ in range(33)]
    sides = [SideStream(GPU) for _ in range(33)]
    recorders = [CudaRecorder(GPU).apart() for _ in range(33)]
    for key, (copy, recorder) in enumerate(zip(copies, recorders, strict=True)):
        begins, calls = threading.Event(), []

        def copied(begins: threading.Event = begins) -> bool:
            begins.wait()
            torch.zeros(2, device=GPU).add_(1)
            return True

        def run(
            calls: list[int] = calls, begins: threading.Event = begins, copy: AdapterCopies = copy
        ) -> None:
            calls.append(1)
            if len(calls) == 2:  # the capture
                begins.set()
                copy.wait()
            x.add_(1)

        copy.begin(key, copied)
        recorder.record(run)
        assert copy.take(key)
        with sides[key].beside():
            torch.zeros(2, device=GPU).add_(1)
    assert ORDER.dealt - dealt <= 3  # recorder, copies, side: of the process


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


def test_what_is_recorded_apart_is_repeated_in_any_order() -> None:
    """As a window's layer before it goes back: a later one has not written over what it made."""
    shared = CudaRecorder(GPU)
    made: list[Tensor] = []

    def makes(x: Tensor) -> Callable[[], None]:
        def run() -> None:
            y = x * 2
            made.append(y * 1)

        return run

    first, second = ones(), ones() * 5
    again = shared.apart().record(makes(first))
    del made[0]
    shared.apart().record(makes(second))()
    again()
    assert made[-1].tolist() == [[10.0] * 4] * 4
    assert made[0].tolist() == [[2.0] * 4] * 4


def test_a_pool_outlives_its_graphs() -> None:
    """A job's end drops all graphs of a pool that the next one records into."""
    recorder, to = CudaRecorder(GPU), torch.zeros(4, 4, device=GPU)
    for value in (1, 2, 3):
        run = doubled(ones() * value, to)
        again = recorder.record(run)
        again()
        assert to.tolist() == [[2.0 * value] * 4] * 4
        del again


def test_where_memory_is_short_what_is_cached_is_given_back_once() -> None:
    x, to, calls = ones(), torch.zeros(4, 4, device=GPU), list[bool]()
    double = doubled(x, to)

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
