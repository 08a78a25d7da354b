"""Every thread that launches or copies has its device as the current one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

import pcg
from pcg.kernels.devices import device_pool, device_thread, indexed, uploaded
from pcg.runtime.admission.limits import Limits
from pcg.runtime.data.example import Example
from tests.support.interpreter import bf16
from tests.support.interpreter.stand_in import stand_in
from tests.support.interpreter.streams import DEVICE, ORDER, OTHER, DeviceError
from tests.support.prompts import prompts
from tests.support.recorded_steps import executor_of

bf16.install()

ROOMS = ("runtime", "split", "train", "kernels", "parallel", "serve/engine")
"""Rooms of which threads may reach a device."""
STARTED = {"Thread", "ThreadPoolExecutor", "Timer", "start_new_thread", "run_in_executor"}
"""Names by which Python starts threads."""
WAITS = {
    ("runtime/engine/async_engine.py", "to_thread"),
    ("runtime/engine/trainers.py", "to_thread"),
    ("serve/engine/channel.py", "Thread"),
}
"""What only waits for another thread, or for a socket."""


def started(path: Path) -> list[tuple[int, str]]:
    """The lines of a file that start threads by themselves."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in STARTED or name == "to_thread":
                found.append((node.lineno, name))
        elif isinstance(node, ast.ClassDef):
            bases = {getattr(base, "attr", getattr(base, "id", "")) for base in node.bases}
            found += [(node.lineno, name) for name in bases & STARTED]
    return found


def test_threads_are_started_with_their_device() -> None:
    """By `device_thread` and `device_pool`, which ask for it."""
    root = Path(pcg.__file__).parent
    found = [
        f"{name}:{line}: {by}"
        for room in ROOMS
        for path in sorted((root / room).rglob("*.py"))
        for line, by in started(path)
        if (name := str(path.relative_to(root))) != "kernels/devices.py" and (name, by) not in WAITS
    ]
    assert not found, "start these by pcg.kernels.devices"


# ------------------------------------------------------------------------------------ threads


@triton.jit
def _double(x, y):  # type: ignore[no-untyped-def]
    tl.store(y, 2 * tl.load(x))


@pytest.fixture
def gpu() -> Iterator[None]:
    """Have two GPUs; this thread's current one is not the one that is used."""
    with stand_in():
        ORDER.gpu = OTHER
        yield
        ORDER.gpu = DEVICE.index


def doubled() -> float:
    x = torch.full((1,), 3.0, device=DEVICE)
    y = torch.empty_like(x)
    _double[(1,)](x, y)
    return float(y)


def test_a_thread_launches_pins_and_records_on_its_device(gpu: None) -> None:
    def act() -> float:
        uploaded(torch.ones(2), DEVICE)
        torch.cuda.Event().record()
        return doubled()

    with device_pool(DEVICE, 1, "own") as pool:
        assert pool.submit(act).result() == 6.0
    found: list[float] = []
    thread = device_thread(DEVICE, lambda: found.append(act()), "own")
    thread.start()
    thread.join()
    assert found == [6.0]
    assert thread.daemon


@pytest.mark.parametrize(
    ("act", "what"),
    [
        (doubled, "the launch of _double"),
        (lambda: torch.ones(2).pin_memory(), "the context that pins memory"),
        (lambda: torch.cuda.Event().record(), "an event"),
        (lambda: torch.cuda.Stream(), "a stream"),  # looked up in the stand-in
    ],
)
def test_on_another_gpu_it_is_an_error(gpu: None, act: object, what: str) -> None:
    with pytest.raises(DeviceError, match=rf"{what} is on cuda:{OTHER} in thread 'MainThread'"):
        act()  # type: ignore[operator]


def test_cuda_is_the_current_gpu_once_and_for_all(gpu: None) -> None:
    assert indexed(torch.device("cuda")) == torch.device("cuda", OTHER)
    assert indexed(DEVICE) == DEVICE
    assert indexed(torch.device("cpu")) == torch.device("cpu")


# ------------------------------------------------------------------------------------ executors


def test_what_a_users_thread_calls_runs_on_the_executors_gpu(gpu: None) -> None:
    """Compiling, adapters, logits, requests, steps of an engine, losses and gradients."""
    executor = executor_of(1, "cuda:0")
    sequences, adapters = prompts((5, 3)), ["r4", None]
    assert len(executor.logits(sequences, adapters)) == 2
    done = executor.generate(sequences, adapters, max_new_tokens=2, temperature=0)
    engine = executor.engine(Limits(tokens=16), kv_cache_bytes=2**20, warm_up=False)
    for ids, name in zip(sequences, adapters, strict=True):
        engine.submit(executor.request(ids, name, max_new_tokens=2, temperature=0))
    served: dict[int, list[int | None]] = {0: [], 1: []}
    while not engine.is_idle:
        for chunk in engine.step():
            served[chunk.index].append(chunk.token_id)
    assert [list(one.token_ids) for one in done] == list(served.values())
    runner = executor.training_runner("r4")
    assert runner.forward_backward([Example([5, 6, 7], [5, 6, 7])], 2.0) > 0
    assert ORDER.gpu == OTHER  # the thread's own choice is left as it was


@pytest.mark.slow
def test_threads_of_an_engine_run_on_its_gpu(gpu: None) -> None:
    """Its steps, copies of adapters, and adapters that are read and compiled for beside them."""
    executor = executor_of(1, "cuda:0")
    ids = prompts((5,))[0]
    alone = executor.generate([ids, ids], ["r4", "r20"], max_new_tokens=3, temperature=0)
    engine = executor.engine(Limits(tokens=16), kv_cache_bytes=2**20)
    with engine.start() as running:
        recipe = {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]}
        running.add_adapter("late", recipe).result()
        streams = [
            running.submit(ids, name, max_new_tokens=3, temperature=0)
            for name in ("r4", "r20", "late")
        ]
        found = [[list(done.token_ids) for done in stream.wait_all()] for stream in streams]
    assert [one[0] for one in found[:2]] == [list(one.token_ids) for one in alone]
