"""Optimizers' options and states against the classes of torch.optim and bitsandbytes."""

import inspect
import sys
from collections.abc import Mapping
from typing import Any

import bitsandbytes
import pytest
import torch

from pcg.errors import FinetuneError
from pcg.runtime.training.torch_optimizers import (
    OPTIMIZERS,
    SHARED_KEYS,
    Optimizer,
    _defaults,
)

SHAPES = ((3, 4), (5,), (3, 1), (64, 63), (64, 64), (64, 64), (65, 63), (4100,))
"""From 4,096 numbers on 8-bit states are in blocks of 256, the last of which may be shorter."""
ELSEWHERE = {"self", "params", "lr"}
"""The learning rate has a field and a schedule."""
HOW = {"foreach", "fused", "maximize", "differentiable", "capturable"}
"""How a step is computed, or of what: of no use here."""
NONE_OF_8BIT = {"amsgrad", "optim_bits", "args", "is_paged"}
"""What 8-bit classes refuse, and paging, for which states are offloaded."""
OF_8BIT = ("adam8bit", "adamw8bit", "lion8bit")
VARIANTS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    *((name, {}) for name in OPTIMIZERS),
    ("adam", {"amsgrad": True}),
    ("adamw", {"amsgrad": True}),
    ("rmsprop", {"momentum": 0.9}),
    ("rmsprop", {"centered": True, "momentum": 0.5}),
    ("sgd", {"momentum": 0.9, "nesterov": True}),
    ("adamw8bit", {"min_8bit_size": 12}),
    ("lion8bit", {"min_8bit_size": 10**6}),
)


def classes() -> dict[str, Any]:
    found = {name: getattr(torch.optim, name) for name in dir(torch.optim)}
    found |= {name: getattr(bitsandbytes.optim, name) for name in ("Adam8bit", "AdamW8bit")}
    found["Lion8bit"] = bitsandbytes.optim.Lion8bit
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
    without = ELSEWHERE | (NONE_OF_8BIT if name in OF_8BIT else HOW)
    expected = {key: p.default for key, p in taken.items() if key not in without}
    if name == "adam":
        del expected["decoupled_weight_decay"]  # that is AdamW
    assert Optimizer.of(name.upper()).options == expected


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_what_is_kept(name: str, options: Mapping[str, Any]) -> None:
    optimizer = Optimizer.of(name, options)
    shapes = [s for s in SHAPES if len(s) == 2 or not optimizer.takes_matrices_alone]
    parameters = [torch.randn(shape) for shape in shapes]
    made = classes()[name](parameters, lr=0.1, **optimizer.options)
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        made.step()
    kept = [made.state.get(parameter, {}) for parameter in parameters]
    expected = [optimizer.state(shape, torch.float32) for shape in shapes]
    for state, predicted in zip(kept, expected, strict=True):
        assert {key: kind_of(value) for key, value in state.items()} == {
            key: kind_of(value) for key, value in predicted.items()
        }
    found = optimizer.state_memory(shapes, torch.float32)
    assert found.device_bytes == storage_bytes(made)
    assert found.host_bytes == found.update_bytes == 0


def kind_of(value: Any) -> Any:
    return (value.shape, value.dtype) if isinstance(value, torch.Tensor) else type(value)


def storage_bytes(optimizer: torch.optim.Optimizer) -> int:
    """The bytes of the tensors in a state dict, of which several may be one."""
    found: dict[int, int] = {}

    def read(values: Mapping[Any, Any]) -> None:
        for value in values.values():
            if isinstance(value, torch.Tensor):
                found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
            elif isinstance(value, Mapping):
                read(value)

    read(optimizer.state_dict()["state"])
    return sum(found.values())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bytes_of_offloaded_states(name: str) -> None:
    """Scalars of the device stay there, and what codes stand for; an update has one parameter's."""
    shapes = [shape for shape in SHAPES if len(shape) == 2]
    stay = {"adam8bit": 2048, "adamw8bit": 2048, "asgd": 12 * len(shapes), "lion8bit": 1024}
    here, there = (Optimizer.of(name, None, is_offloaded) for is_offloaded in (False, True))
    found = there.state_memory(shapes, torch.float32)
    assert found.device_bytes == stay.get(name, 0)
    whole = here.state_memory(shapes, torch.float32)
    assert found.device_bytes + found.host_bytes == whole.device_bytes
    states = [here.state(shape, torch.float32) for shape in shapes]
    own = [
        [v for k, v in state.items() if k not in SHARED_KEYS and k != "step"] for state in states
    ]
    assert found.update_bytes == max(sum(v.nbytes for v in tensors if v.ndim) for tensors in own)


@pytest.mark.parametrize(
    ("name", "known", "is_offloaded"),
    [
        ("adamw_8bit", "adamw8bit", False),
        ("adamw_bnb_8bit", "adamw8bit", False),
        ("paged_adamw_32bit", "adamw", True),
        ("paged_adamw_8bit", "adamw8bit", True),
        ("PAGED_LION_8BIT", "lion8bit", True),
    ],
)
def test_names_of_transformers(name: str, known: str, is_offloaded: bool) -> None:
    optimizer = Optimizer.of(name)
    assert (optimizer.name, optimizer.is_offloaded) == (known, is_offloaded)


def test_without_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    _defaults.cache_clear()
    with pytest.raises(FinetuneError, match=r"not installed: pip install 'pcg\[bitsandbytes\]'"):
        Optimizer.of("adamw8bit")


def test_numbers_of_64_bits_are_refused() -> None:
    with pytest.raises(FinetuneError, match="the adapter is float64; use adamw"):
        Optimizer.of("adamw8bit").state((3, 4), torch.float64)


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
        ("adamw8bit", {"amsgrad": True}, "'adamw8bit' does not take 'amsgrad'"),
        ("adamw8bit", {"min_8bit_size": 0.5}, "min_8bit_size=0.5; use an int above 0"),
        ("adamw_torch_8bit", {}, "is torchao's, and adamw8bit is bitsandbytes'; use one of"),
        ("muon", {"ns_steps": 2.5}, "ns_steps=2.5; use an int above 0"),
        ("muon", {"adjust_lr_fn": 1}, "adjust_lr_fn=1; use a word"),
    ],
)
def test_refusals(name: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(FinetuneError, match=message):
        Optimizer.of(name, options)
