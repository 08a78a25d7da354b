"""Recorded ends of steps give the bits of eager ones: see `tests/support/interpreter/tape.py`."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from pcg.runtime.training import optimizer as optimizers
from pcg.runtime.training.optimizer import (
    load_optimizer,
    make_optimizer,
    optimizer_tensors,
    set_rate,
)
from pcg.runtime.training.recorded.loss_graphs import UpdateGraphs
from pcg.runtime.training.recorded.recorded_program import OwnGradients
from pcg.runtime.training.torch_optimizers import Optimizer
from tests.support.interpreter.tape import Tape

KINDS = [
    Optimizer.of("adamw", {"weight_decay": 0.1}),
    Optimizer.of("sgd", {"weight_decay": 0.1, "momentum": 0.9, "nesterov": True}),
    Optimizer.of("sgd", {}),
]
RATES = (0.1, 0.0, 0.02, 0.3)


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(3, 4, generator=generator), torch.randn(4, generator=generator)]


def parameters() -> dict[str, Tensor]:
    return {"a": torch.full((3, 4), 0.5), "b.bias": torch.ones(4)}


def run(
    kind: Optimizer, recorder: Tape | None, saved: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Parameters, states and norms after some steps, from a saved state if one is given."""
    own, weights = OwnGradients(), parameters()
    optimizer = make_optimizer(weights, kind, 0.1)
    # All else is recorded from the second step on: the first makes states that are no zeros.
    is_late = not optimizer.defaults.get("fused") and saved is None
    if saved is not None:
        load_optimizer(optimizer, kind, weights, {name: x.clone() for name, x in saved.items()})

    def clip() -> Tensor:
        norm = torch.nn.utils.get_total_norm(
            [x.grad for x in weights.values() if x.grad is not None]
        )
        torch.nn.utils.clip_grads_with_norm_(weights.values(), 0.5, norm)
        return norm

    graphs = UpdateGraphs(optimizer, clip, own, recorder or Tape())
    found = {}
    for step, rate in enumerate(RATES):
        if recorder is not None:
            own.hold(weights.values())
        for weight, gradient in zip(weights.values(), gradients(step), strict=True):
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            weight.grad.add_(gradient)
        assert graphs.serves == (recorder is not None and not (is_late and step == 0))
        found[f"norm {step}"] = (graphs.clip() if graphs.serves else clip()).clone()
        if graphs.serves:
            graphs.step(rate)
        else:
            set_rate(optimizer, rate)
            optimizer.step()
        for weight in weights.values():
            weight.grad = None
    return found | weights | optimizer_tensors(optimizer, weights)


CAPTURABLE: dict[str, dict[str, Any]] = {
    "adadelta": {},
    "adamax": {"weight_decay": 0.1},
    "asgd": {},
    "nadam": {"weight_decay": 0.1, "decoupled_weight_decay": True},
    "radam": {"weight_decay": 0.1},
    "rmsprop": {"momentum": 0.5, "centered": True},
    "rprop": {},
}


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have torch's optimizers step on the CPU as they do on a GPU."""
    monkeypatch.setattr(optimizers, "_CAPTURED_ON", ("cpu",))
    for name in CAPTURABLE:
        module = importlib.import_module(f"torch.optim.{name}")
        monkeypatch.setattr(module, "_get_capturable_supported_devices", lambda **_: ["cpu"])
    made, one = torch.tensor, torch.tensor(1.0)

    def tensor(value: object, **options: Any) -> Tensor:
        # On the CPU they count steps by a tensor of the host's, and on a GPU by the number.
        return one if value == 1.0 and options == {"device": "cpu"} else made(value, **options)

    monkeypatch.setattr(torch, "tensor", tensor)


@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=["adamw", "momentum", "sgd"])
def test_recorded_updates_have_the_bits_of_eager_ones(kind: Optimizer, resumes: bool) -> None:
    recorded_and_eager(kind, resumes, 0)


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize("name", CAPTURABLE)
def test_updates_that_may_be_captured_are_recorded(name: str, resumes: bool) -> None:
    recorded_and_eager(Optimizer.of(name, CAPTURABLE[name]), resumes, 0 if resumes else 1)


@pytest.mark.parametrize("name", CAPTURABLE)
def test_a_captured_step_is_that_of_a_cpu_but_for_rounding(
    name: str, request: pytest.FixtureRequest
) -> None:
    kind = Optimizer.of(name, CAPTURABLE[name])
    expected = run(kind, None)
    request.getfixturevalue("captured")
    for key, value in run(kind, None).items():
        torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-5)


def recorded_and_eager(kind: Optimizer, resumes: bool, eager_steps: int) -> None:
    """Recorded steps give the bits of eager ones; so many of these come first."""
    saved = None
    if resumes:
        state = run(kind, None)
        saved = {name: state[name] for name in state if "/" in name}
    expected, recorder = run(kind, None, saved), Tape()
    found = run(kind, recorder, saved)
    assert (recorder.recorded, recorder.replayed) == (2, 2 * (len(RATES) - eager_steps))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
