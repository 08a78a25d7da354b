"""The pool of a GPU has what other parts leave of a share of its memory, and all of them fit."""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch

import pcg.compiler as compiler
from pcg.errors import DeviceMemoryError, EngineError
from pcg.runtime.admission.limits import Limits
from pcg.runtime.engine.device import device_memory
from pcg.runtime.engine.device.device_memory import step_bytes
from pcg.runtime.engine.options import EngineArguments
from pcg.runtime.executor import Executor
from pcg.runtime.model import step_graphs
from pcg.runtime.model.weights import StateDictCheckpoint
from pcg.runtime.training import bound_training
from pcg.runtime.training.recorded.warm_job import WarmJob
from pcg.runtime.training.warm_jobs import windows_bytes
from tests.support import oracle
from tests.support.families import BY_NAME
from tests.support.interpreter import bf16
from tests.support.interpreter.device_tensors import MEMORY
from tests.support.interpreter.stand_in import tensors_on_cuda
from tests.support.recorded_steps import Step, Steps, executor_of
from tests.support.small_engine import make_executor

bf16.install()

BASE = oracle.random_model(BY_NAME["llama3"].config(1, max_position_embeddings=128))
PROGRAMS = {
    backend: compiler.compile_program(BASE.config, None, backend=backend, dtype="float32")
    for backend in ("torch", "triton")
}
LIMITS = Limits(tokens=16, running=2)
MIB = 2**20


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Executor]]:
    """Have a GPU of so many bytes, of which others use some, and a model there."""
    gc.collect()
    with tensors_on_cuda():
        monkeypatch.setattr(MEMORY, "used", 0)

        def make(total: int = 64 * MIB, others: int = 0, backend: Any = "torch") -> Executor:
            monkeypatch.setattr(MEMORY, "total", total)
            monkeypatch.setattr(MEMORY, "used", MEMORY.used + others)
            program = PROGRAMS[backend]
            weights = StateDictCheckpoint(BASE.state_dict(), program.base_prefix)
            return compiler.make_executor(program, weights, None, None, "cuda")

        yield make
        gc.collect()


@functools.cache
def interpreted() -> Executor:
    """A program for Triton on the CPU."""
    return executor_of(1, "cpu")


def used() -> int:
    gc.collect()
    return MEMORY.used


# ------------------------------------------------------------------------------------ the size


def test_elsewhere_it_is_4_gib() -> None:
    engine = make_executor().engine(LIMITS)
    page = engine.device.cache.size_bytes // engine.scheduler.pool.size
    assert 2**32 - page < engine.device.cache.size_bytes <= 2**32


@pytest.mark.parametrize(
    ("share", "others"), [(0.5, 0), (0.9, 0), (1.0, 0), (0.5, 20 * MIB)], ids=str
)
def test_the_pool_is_what_is_left_of_the_share(
    gpu: Callable[..., Executor], share: float, others: int
) -> None:
    """What other processes use counts for nothing, as long as the share is free."""
    executor = gpu(others=others)
    weights = used() - others
    assert weights > 0
    engine = executor.engine(LIMITS, gpu_memory_utilization=share)
    step = step_bytes(executor.program.base, LIMITS, executor.max_positions)
    page = engine.device.cache.size_bytes // engine.scheduler.pool.size
    left = share * 64 * MIB - weights - step
    assert left - page <= engine.device.cache.size_bytes <= left
    assert used() - others + step <= share * 64 * MIB
    engine.submit(executor.request([5, 6, 7], max_new_tokens=3, ignore_eos=True))
    while not engine.is_idle:
        assert all(chunk.error is None for chunk in engine.step())


# ------------------------------------------------------------------------------------ refusals


def test_less_is_free_than_is_asked_for(gpu: Callable[..., Executor]) -> None:
    executor = gpu(others=16 * MIB)
    with pytest.raises(DeviceMemoryError) as caught:
        executor.engine(LIMITS)
    assert str(caught.value) == (
        "gpu_memory_utilization=0.9 asks for 57.6 MiB of the 64.0 MiB of cuda:0, of which other "
        "processes had left 48.0 MiB when the model was loaded; end them, or use at most 0.75"
    )
    executor.engine(LIMITS, gpu_memory_utilization=0.75)


def test_parts_that_leave_no_room_are_named(gpu: Callable[..., Executor]) -> None:
    executor = gpu(total=2 * MIB)
    with pytest.raises(DeviceMemoryError, match=r"no room for a KV cache of .* \(the least\)") as e:
        executor.engine(Limits(tokens=8192, running=2))
    for part in ("of 2.0 MiB and gpu_memory_utilization=0.9", "weights and adapters", "steps"):
        assert part in str(e.value)
    assert "a smaller max_num_batched_tokens" in str(e.value)


def test_a_size_that_does_not_fit_is_named(gpu: Callable[..., Executor]) -> None:
    executor = gpu()
    with pytest.raises(
        DeviceMemoryError,
        match=r"no room for a KV cache of 80\.0 MiB \(out of memory.*use a smaller kv_cache_gib",
    ):
        executor.engine(LIMITS, kv_cache_bytes=80 * MIB)


@pytest.mark.parametrize("share", [0, -0.1, 1.01, float("nan"), "all", None])
def test_shares_that_are_none(share: Any) -> None:
    with pytest.raises(EngineError, match=r"gpu_memory_utilization=.*; use a share"):
        EngineArguments(gpu_memory_utilization=share)


# ------------------------------------------------------------------------------------ recordings


class Greedy:
    """A recorder whose graphs each take some of the device's memory, and run nothing."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.held: list[torch.Tensor] = []

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        held = torch.empty(self.size_bytes, dtype=torch.uint8, device="cuda")
        return lambda: held.zero_() and None


def test_graphs_that_need_more_make_the_pool_smaller(
    gpu: Callable[..., Executor], caplog: pytest.LogCaptureFixture
) -> None:
    """Each time all is recorded again, and no step is left without a graph."""
    size_bytes = 12 * MIB
    executor = gpu(backend="triton")
    with (
        patch.object(device_memory, "GRAPH_BYTES", 0),
        patch.object(step_graphs, "recorder_for", lambda device: Greedy(size_bytes)),
        caplog.at_level(logging.WARNING, "pcg.engine"),
    ):
        engine = executor.engine(LIMITS, warm_up=True)
    graphs = engine.device.graphs
    assert graphs is not None
    assert graphs.is_warm
    assert graphs.recorded == 3
    step = step_bytes(executor.program.base, LIMITS, executor.max_positions)
    assert used() + step <= 0.91 * 64 * MIB
    assert "leaves too little memory for the rest" in caplog.text
    assert engine.device.warmed is not None
    assert engine.device.warmed.size_bytes >= graphs.recorded * size_bytes


def test_graphs_that_never_fit_are_named(gpu: Callable[..., Executor]) -> None:
    executor = gpu(backend="triton")
    with (
        patch.object(step_graphs, "recorder_for", lambda device: Greedy(80 * MIB)),
        pytest.raises(DeviceMemoryError) as caught,
    ):
        executor.engine(LIMITS, warm_up=True, kv_cache_bytes=4 * MIB)
    assert "cannot be recorded as a CUDA graph" in str(caught.value)
    assert "use a smaller kv_cache_gib" in str(caught.value)


class Full:
    """A recorder of a device that has no memory left for some rooms."""

    def __init__(self) -> None:
        self.is_full = True

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        if self.is_full:
            try:
                raise torch.OutOfMemoryError("CUDA out of memory")
            except torch.OutOfMemoryError:  # as the end of a capture does
                raise RuntimeError("operation failed due to a previous error") from None
        run()
        return run

    def apart(self) -> Full:
        return self


def test_a_late_room_without_memory_leaves_the_others_recorded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    recorder = Full()
    steps = Steps(interpreted(), recorder)
    with caplog.at_level(logging.WARNING, "pcg.engine"):
        assert steps.both(Step([5], [3], [None]))[1] is None
        assert steps.both(Step([5], [3], [None]))[1] is None
    assert caplog.text.count("a step of 1 token cannot be recorded as a CUDA graph") == 1
    assert "use a smaller one, by a lower gpu_memory_utilization" in caplog.text
    assert steps.graphs.eager == {"no memory is left to record its room": 2}
    recorder.is_full = False
    expected, found = steps.both(Step([5, 6], [3, 4], [None, None]))
    assert found is not None
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_windows_of_a_known_job_that_have_no_memory_end_the_warm_up() -> None:
    executor = interpreted()
    job = WarmJob({"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]}, 1, 16)
    with (
        patch.object(step_graphs, "recorder_for", lambda device: TapeOnce()),
        patch.object(bound_training, "recorder_for", lambda device: Full()),
        pytest.raises(DeviceMemoryError, match="a window of 16 tokens cannot be recorded"),
    ):
        executor.engine(LIMITS, warm_up=True, warm_jobs=[job], kv_cache_bytes=2**20)


def test_what_windows_of_known_jobs_take() -> None:
    """More tokens save more; of two jobs with one recipe the larger counts."""
    executor = interpreted()
    recipe = {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]}
    sizes = [
        windows_bytes(executor.state, [WarmJob(recipe, batch, seq) for batch, seq in jobs])
        for jobs in ([], [(1, 64)], [(2, 64)], [(1, 64), (2, 64)])
    ]
    assert sizes[0] == 0 < sizes[1] < sizes[2] == sizes[3]


class TapeOnce:
    """A recorder that runs and records nothing."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        return lambda: None


def test_a_pool_larger_than_the_host_is_refused() -> None:
    with pytest.raises(DeviceMemoryError, match=r"of 4\.9 TiB does not fit .* kv_cache_gib"):
        make_executor().engine(kv_cache_bytes=5000 * 2**30)
