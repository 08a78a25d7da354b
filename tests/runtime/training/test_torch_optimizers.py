"""Optimizers' options and states against the classes of torch.optim."""

import inspect
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from pcg.errors import FinetuneError
from pcg.runtime.training.torch_optimizers import OPTIMIZERS, Optimizer

SHAPES = ((3, 4), (5,), (3, 1))
ELSEWHERE = {"self", "params", "lr"}
"""The learning rate has a field and a schedule."""
HOW = {"foreach", "fused", "maximize", "differentiable", "capturable"}
"""How a step is computed, or of what: of no use here."""
VARIANTS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    *((name, {}) for name in OPTIMIZERS),
    ("adam", {"amsgrad": True}),
    ("adamw", {"amsgrad": True}),
    ("rmsprop", {"momentum": 0.9}),
    ("rmsprop", {"centered": True, "momentum": 0.5}),
    ("sgd", {"momentum": 0.9, "nesterov": True}),
)


def classes() -> dict[str, Any]:
    found = {name: getattr(torch.optim, name) for name in dir(torch.optim)}
    return {
        name.lower(): made
        for name, made in found.items()
        if inspect.isclass(made) and issubclass(made, torch.optim.Optimizer)
    }


def test_every_class_of_torch_is_there_or_refused_by_name() -> None:
    assert sorted({*OPTIMIZERS, "lbfgs", "sparseadam", "optimizer"}) == sorted(classes())
    for name in ("LBFGS", "SparseAdam"):
        with pytest.raises(
            FinetuneError, match=rf"'{name}' is not .*{name}.*use one of adadelta, "
        ):
            Optimizer.of(name)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_options_and_defaults_are_torchs(name: str) -> None:
    taken = inspect.signature(classes()[name].__init__).parameters
    expected = {key: p.default for key, p in taken.items() if key not in ELSEWHERE | HOW}
    if name == "adam":
        del expected["decoupled_weight_decay"]  # that is AdamW
    assert Optimizer.of(name.upper()).options == expected


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_what_torch_keeps(name: str, options: Mapping[str, Any]) -> None:
    optimizer = Optimizer.of(name, options)
    shapes = [s for s in SHAPES if len(s) == 2 or not optimizer.takes_matrices_alone]
    parameters = [torch.randn(shape) for shape in shapes]
    made = classes()[name](parameters, lr=0.1, **optimizer.options)
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        made.step()
    kept = [made.state.get(parameter, {}) for parameter in parameters]
    expected = [optimizer.state(shape) for shape in shapes]
    for state, predicted in zip(kept, expected, strict=True):
        assert {key: tensor.shape for key, tensor in state.items()} == {
            key: tensor.shape for key, tensor in predicted.items()
        }
    measured = sum(tensor.nbytes for state in kept for tensor in state.values())
    assert measured == optimizer.state_bytes(shapes, 4)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("adamw2", {}, "'adamw2' is not among those that pcg trains with; use one of adadelta"),
        (3, {}, "optimizer=3 is not"),
        ("sgd", {"momentun": 0.9}, "'sgd' does not take 'momentun', did you mean 'momentum'"),
        ("sgd", {"betas": (0.9, 0.9)}, "does not take 'betas'; it takes momentum, dampening, wei"),
        ("sgd", {"nesterov": 1}, "nesterov=1; use True or False"),
        ("rprop", {"etas": (0.5,)}, r"etas=\(0.5,\); use 2 numbers, such as \(0.5, 1.2\)"),
        ("rmsprop", {"alpha": "0.9"}, "alpha='0.9'; use a number, such as 0.99"),
        ("muon", {"ns_steps": 2.5}, "ns_steps=2.5; use an int above 0"),
        ("muon", {"adjust_lr_fn": 1}, "adjust_lr_fn=1; use a word"),
    ],
)
def test_refusals(name: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(FinetuneError, match=message):
        Optimizer.of(name, options)
