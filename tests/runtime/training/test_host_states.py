"""States in host memory: the same bits as on the device, one parameter's at a time, and bytes."""

import copy
from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import pcg
from pcg.runtime.training.optimizer import (
    HostStates,
    load_optimizer,
    make_optimizer,
    optimizer_tensors,
)
from pcg.runtime.training.torch_optimizers import OPTIMIZERS, SHARED_KEYS, Optimizer
from tests.support.small_job import LORA, make_model

SHAPES = {"small": (3, 5), "large": (65, 64), "bias": (1, 7)}
VARIANTS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    *((name, {}) for name in OPTIMIZERS),
    ("adam", {"amsgrad": True}),
    ("rmsprop", {"momentum": 0.9, "centered": True}),
    ("sgd", {"momentum": 0.9, "nesterov": True}),
)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_updates_are_those_of_the_library(
    name: str, options: Mapping[str, Any], device: str
) -> None:
    """Beside its own step over all parameters; in the middle the job is resumed."""
    torch.manual_seed(0)
    start = {path: torch.randn(shape, device=device) for path, shape in SHAPES.items()}
    here, there = copy.deepcopy(start), copy.deepcopy(start)
    kind = Optimizer.of(name, options, is_offloaded=True)
    theirs = make_optimizer(here, kind, 1e-2)
    ours = make_optimizer(there, kind, 1e-2)
    states = HostStates(ours)
    for step in range(5):
        if step == 3:
            saved = copy.deepcopy(optimizer_tensors(ours, there))
            ours = make_optimizer(there, kind, 1e-2)
            states = HostStates(ours)
            load_optimizer(ours, kind, there, saved)
        for path in SHAPES:
            gradient = torch.randn(SHAPES[path], device=device)
            here[path].grad, there[path].grad = gradient, gradient.clone()
        theirs.step()
        states.step()
    for path, tensor in here.items():
        assert torch.equal(there[path], tensor)
        assert not torch.equal(tensor, start[path])
    found, expected = optimizer_tensors(ours, there), optimizer_tensors(theirs, here)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key].to(found[key].device)) for key in expected)
    moved = [v for k, v in found.items() if v.ndim and k not in SHARED_KEYS]
    assert all(not v.is_cuda and v.is_pinned() == (device == "cuda") for v in moved)


@pytest.mark.parametrize(
    ("name", "options"),
    # Without dampening SGD's learning rate would be on the device that is not there.
    [("sgd", {"momentum": 0.9, "dampening": 0.1}), ("adamw8bit", {}), ("lion8bit", {})],
)
def test_a_gpu_has_the_states_of_one_parameter(name: str, options: Mapping[str, Any]) -> None:
    """Tensors without data show where states lie; what all parameters share stays there."""
    kind = Optimizer.of(name, options, is_offloaded=True)
    shapes = {str(i): (64 + i, 64) for i in range(3)}
    expected = kind.state_memory(shapes.values(), torch.float32)
    stream = mock.Mock()
    streams = {"current_stream": mock.Mock(return_value=stream)}
    fake = FakeTensorMode(allow_non_fake_inputs=True)  # bitsandbytes' table of codes has data
    with fake:
        parameters = {path: torch.empty(shape, device="cuda") for path, shape in shapes.items()}
    optimizer = make_optimizer(parameters, kind, 1e-3)
    with fake, mock.patch.multiple("torch.cuda", synchronize=mock.DEFAULT, **streams):
        states = HostStates(optimizer)
        library_step, most = optimizer.step, 0

        def bytes_on(device: str) -> int:
            return sum(
                value.nbytes
                for state in optimizer.state.values()
                for key, value in state.items()
                if isinstance(value, Tensor) and key not in SHARED_KEYS
                if value.device.type == device
            )

        def step() -> None:
            nonlocal most
            library_step()
            most = max(most, bytes_on("cuda"))

        with mock.patch.object(optimizer, "step", step):
            for _ in range(2):
                for tensor in parameters.values():
                    tensor.grad = torch.empty_like(tensor)
                states.step()
                assert bytes_on("cuda") == 0
        assert (bytes_on("cpu"), most) == (expected.host_bytes, expected.update_bytes)
        assert stream.synchronize.call_count == 2


def test_explain_counts_both_memories() -> None:
    report = pcg.explain(make_model(), LORA, optimizer="paged_adamw")
    moments = 2 * 4 * report.parameters["trainable"]
    counts = 4 * 8  # of the steps of each of eight matrices
    memory = report.memory_bytes
    assert (memory["optimizer"], report.host_bytes) == (0, {"optimizer": moments + counts})
    assert memory["total"] == sum(memory.values()) - memory["total"]
    update = report.timeline[-1]
    assert (update.label, update.kept_bytes) == ("update", 0)
    assert update.workspace_bytes == 2 * 4 * 4 * 64  # the moments of an A at down_proj
    assert "and in host memory: " in report.to_text()
    assert "In host memory, beside it:" in report.to_html()
