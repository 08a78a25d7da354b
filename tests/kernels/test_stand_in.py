"""Tests of a GPU on the one that is not there, and that it refuses what a device would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from pcg.kernels.devices import uploaded
from tests.support import on_device
from tests.support.interpreter import bf16
from tests.support.interpreter.stand_in import stand_in
from tests.support.interpreter.streams import ORDER, DeviceError

bf16.install()


@pytest.fixture
def gpu() -> Iterator[None]:
    with stand_in():
        yield


# ------------------------------------------------------------------------------- what is refused


@triton.jit
def _add(x, addresses, y):  # type: ignore[no-untyped-def]
    """y = x + what lies at an address."""
    other = tl.load(addresses).to(tl.pointer_type(tl.float32))
    tl.store(y, tl.load(x) + tl.load(other))


def test_operators_and_kernels_of_tensors_on_the_host(gpu: None) -> None:
    x, there = torch.ones(2, device="cuda"), torch.ones(2)
    assert (x + torch.tensor(2.0) + 1).tolist() == [4, 4]
    with pytest.raises(DeviceError, match=r"aten.add.Tensor is given tensors on cuda:0 and on cpu"):
        x + there
    y = torch.empty_like(x)
    addresses = torch.tensor([x.data_ptr(), there.data_ptr()], device="cuda")
    _add[(1,)](x, addresses, y)
    assert y[0].item() == 2
    with pytest.raises(DeviceError, match=r"_add: a pointer to memory of cpu"):
        _add[(1,)](there, addresses, y)
    with pytest.raises(DeviceError, match=r"_add reads host memory"):
        _add[(1,)](x, addresses[1:], y)


WAITS: dict[str, Callable[[Tensor], object]] = {
    "a number": lambda x: x[0].item(),
    "numbers": lambda x: x.tolist(),
    "a copy to the host": lambda x: x.cpu(),
    "a copy of memory that is not pinned": lambda x: torch.ones(2).to(x.device, non_blocking=True),
    "numbers on the device": lambda x: torch.tensor([1, 2], device=x.device),
    "how many are true": lambda x: x[x > 0],
    "which are not 0": lambda x: x.nonzero(),
}


@pytest.mark.parametrize("name", WAITS)
def test_what_waits_for_the_device(gpu: None, name: str) -> None:
    x = torch.ones(2, device="cuda")
    uploaded(torch.ones(2), x.device)
    count = len(ORDER.waits)
    WAITS[name](x)
    assert len(ORDER.waits) == count + 1
    torch.cuda.set_sync_debug_mode("error")
    uploaded(torch.ones(2), x.device)
    with pytest.raises(DeviceError, match="waits for the device"):
        WAITS[name](x)
    torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises((DeviceError, RuntimeError), match="waits for the"):
        WAITS[name](x)


def test_pinned_memory_that_the_device_has_not_read(gpu: None) -> None:
    pinned = torch.zeros(3).pin_memory()
    there = pinned.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    pinned.fill_(1)
    there.copy_(pinned, non_blocking=True)
    assert there.tolist() == [1, 1, 1]
    there.copy_(pinned, non_blocking=True)
    pinned.fill_(2)
    with pytest.raises(DeviceError, match="before the device had read it"):
        torch.cuda.synchronize()
    pinned.fill_(1)


def test_a_copy_to_the_host_that_nobody_waits_for(gpu: None) -> None:
    with pytest.raises(DeviceError, match="may not be there yet"):
        torch.ones(2, device="cuda").to("cpu", non_blocking=True)


def test_streams_that_nothing_orders(gpu: None) -> None:
    side = torch.cuda.Stream()
    x = torch.zeros(64, device="cuda")
    with torch.cuda.stream(side), pytest.raises(DeviceError, match=r"clone.* stream \d+ reads"):
        x.clone()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x[:32].clone()
        x[32:].add_(1)
    x[:32].clone()
    with pytest.raises(DeviceError, match=r"writes what .*clone.* may still read"):
        x[:32].add_(1)
    with pytest.raises(DeviceError, match=r"reads what .*add_.* may still write"):
        x[::40].clone()
    torch.cuda.current_stream().wait_event(side.record_event())
    x[:32].add_(1)
    assert y.tolist() == [0] * 32


@pytest.mark.parametrize("means", ["wait", "record", "none"])
def test_memory_that_goes_back_while_another_stream_uses_it(gpu: None, means: str) -> None:
    side = torch.cuda.Stream()
    x = torch.zeros(64, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x + 1
    if means == "wait":
        torch.cuda.current_stream().wait_stream(side)
    if means == "record":
        x.record_stream(side)
    del x
    if means == "none":
        with pytest.raises(DeviceError, match=r"freed while .*add.* may still use it"):
            torch.zeros(1, device="cuda")
    else:
        torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    assert y.sum().item() == 64


def test_a_branch_of_a_graph(gpu: None) -> None:
    x, side = torch.ones(4, device="cuda"), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    assert not torch.cuda.is_current_stream_capturing()
    with torch.cuda.graph(graph):
        first = torch.cuda.current_stream()
        side.wait_stream(first)
        with torch.cuda.stream(side):
            assert torch.cuda.is_current_stream_capturing()
            y = x + 1
        z = x * 3
        first.wait_stream(side)
        z += y
    x.fill_(2)
    graph.replay()
    assert z.tolist() == [9] * 4

    def without_an_end() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                x.neg()

    with pytest.raises(DeviceError, match="nothing waits for"):
        without_an_end()


# ---------------------------------------------------------------------------- the tests of a GPU


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["llama3", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gemma2", "opt", "gpt2"))],
)
def test_whole_programs(gpu: None, name: str, tmp_path: Path) -> None:
    on_device.whole_programs(name, tmp_path)


@pytest.mark.slow
def test_rows_of_adapters(gpu: None) -> None:
    on_device.rows_of_adapters()


@pytest.mark.slow
def test_recorded_steps(gpu: None) -> None:
    on_device.recorded_steps()


@pytest.mark.slow
def test_a_step_waits_for_nothing(gpu: None) -> None:
    on_device.a_step_waits_for_nothing()


BACKENDS = ["torch", pytest.param("triton", marks=pytest.mark.slow)]


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_backward_units_run_beside_the_forward(gpu: None, backend: str) -> None:
    on_device.backward_units_run_beside_the_forward(backend)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_adapters_are_copied_from_the_host_beside_steps(gpu: None, backend: str) -> None:
    on_device.adapters_are_copied_from_the_host_beside_steps(backend)


@pytest.mark.slow
def test_an_engine_replays_its_steps(gpu: None) -> None:
    on_device.an_engine_replays_its_steps()


@pytest.mark.slow
def test_windows_are_recorded(gpu: None) -> None:
    on_device.windows_are_recorded()


def test_a_copy_to_the_host_waits_once(gpu: None) -> None:
    on_device.a_copy_to_the_host_waits_once()


@pytest.mark.slow
def test_jobs_find_windows_that_are_recorded(gpu: None) -> None:
    on_device.jobs_find_windows_that_are_recorded()
