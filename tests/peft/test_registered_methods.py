"""Methods that a user writes outside pcg: served, trained and saved by name, by PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest
import torch
from torch import Tensor

import pcg
from pcg.errors import AdapterError
from pcg.ir.shapes import Shapes
from pcg.peft import registry
from pcg.peft.method import Bypass, Place, Shape, low_rank
from pcg.peft.targets import TargetedRecipe
from pcg.peft.weights import (
    DOWN,
    FACTOR,
    SUMMAND,
    UP,
    Around,
    Draw,
    LowRankWeights,
    ModuleWeights,
    ParameterKind,
)
from pcg.runtime.data.example import Example
from tests.support import compiled, oracle
from tests.support.families import BY_NAME
from tests.support.prompts import TOLERANCE, prompts


@dataclass(frozen=True)
class AffineBypass(Bypass):
    """z = y ⊙ l + b at a module."""

    def trained_shapes(self, out: int, in_: int) -> Shapes:
        return (out,), (out,)

    def union(self, other: Self) -> Self:
        return self

    def attach(self, at: Place, y: str) -> str:
        out, _ = at.shape
        y = at.add("scale", "scaled", y, at.adapter("affine_l", out))
        return at.add("bias_add", "shifted", y, at.adapter("affine_b", out))


@dataclass(frozen=True, eq=False)
class AffineWeights(ModuleWeights):
    suffixes: ClassVar[tuple[str, ...]] = ("affine_l", "affine_b")
    kinds: ClassVar[Mapping[str, ParameterKind]] = {"affine_l": FACTOR, "affine_b": SUMMAND}

    factor: Tensor
    summand: Tensor

    @classmethod
    def fresh(
        cls, recipe: Any, bypass: AffineBypass, shape: Shape, draw: Draw, around: Around
    ) -> Self:
        return cls(draw.full(1.0, shape[0]), draw.zeros(shape[0]))

    @property
    def bypass(self) -> AffineBypass:
        return AffineBypass()

    @property
    def module_shape(self) -> tuple[int, None]:
        return len(self.factor), None


@dataclass(frozen=True, kw_only=True)
class AffineConfig(TargetedRecipe):
    method: ClassVar[str] = "Affine"
    peft_type: ClassVar[str] = "AFFINE"
    weights: ClassVar[type[ModuleWeights]] = AffineWeights
    shorthands: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "affine": {"target_modules": ("q_proj", "down_proj")}
    }

    def bypass_at(self, path: str) -> AffineBypass:
        return AffineBypass()


@dataclass(frozen=True)
class PlainBypass(Bypass):
    """z = y + B (A x) at a module."""

    rank: int

    def trained_shapes(self, out: int, in_: int) -> Shapes:
        return (self.rank, in_), (out, self.rank)

    def union(self, other: Self) -> Self:
        return max(self, other, key=lambda bypass: bypass.rank)

    def attach(self, at: Place, y: str) -> str:
        (out, in_), rank = at.shape, self.rank
        a, b = at.adapter("plain_A", rank, in_), at.adapter("plain_B", out, rank)
        return low_rank(at, y, at.dropped(), a, b, "plain_")


@dataclass(frozen=True, eq=False)
class PlainWeights(LowRankWeights):
    suffixes: ClassVar[tuple[str, ...]] = ("plain_A", "plain_B")
    kinds: ClassVar[Mapping[str, ParameterKind]] = {"plain_A": DOWN, "plain_B": UP}

    @classmethod
    def of(cls, bypass: PlainBypass, *tensors: Tensor) -> Self:
        return cls(*tensors, scale=1.0)

    @classmethod
    def fresh(
        cls, recipe: Any, bypass: PlainBypass, shape: Shape, draw: Draw, around: Around
    ) -> Self:
        out, in_ = shape
        return cls(draw.linear(bypass.rank, in_), draw.zeros(out, bypass.rank), scale=1.0)

    @property
    def bypass(self) -> PlainBypass:
        return PlainBypass(self.rank)


@dataclass(frozen=True, kw_only=True)
class PlainConfig(TargetedRecipe):
    method: ClassVar[str] = "Plain"
    peft_type: ClassVar[str] = "PLAIN"
    weights: ClassVar[type[ModuleWeights]] = PlainWeights
    shorthands: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "plain": {"target_modules": ("q_proj", "down_proj")}
    }
    rank_field: ClassVar[str] = "r"

    r: int = 8

    def bypass_at(self, path: str) -> PlainBypass:
        return PlainBypass(self.r)


FUNCTIONS: Mapping[str, Callable[..., Tensor]] = {
    "affine": lambda x, y, factor, summand: y * factor + summand,
    "plain": lambda x, y, a, b: y + x @ a.t() @ b.t(),
}


@pytest.fixture
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    for recipe in (AffineConfig, PlainConfig):
        names = (recipe.peft_type, *recipe.shorthands, *recipe.weights.kinds)
        for table, name in product((registry.RECIPES, registry.SHORTHANDS, registry._KINDS), names):
            monkeypatch.setitem(table, name, None)
            monkeypatch.delitem(table, name)
        registry.register(recipe)


def hooked(
    base: Any, word: str, weights: Mapping[str, ModuleWeights]
) -> tuple[Any, dict[str, list[Tensor]]]:
    """A copy of the model with the method in hooks, and its tensors by module."""
    model, tensors = copy.deepcopy(base).requires_grad_(False), {}
    for path, of_module in weights.items():
        tensors[path] = [x.detach().clone().requires_grad_() for x in of_module.tensors]
        model.get_submodule(path).register_forward_hook(
            lambda module, args, y, of=tensors[path]: FUNCTIONS[word](args[0], y, *of)
        )
    return model, tensors


@pytest.mark.usefixtures("_registered")
@pytest.mark.parametrize("word", FUNCTIONS)
def test_a_registered_method_serves_trains_and_is_saved(word: str, tmp_path: Path) -> None:
    base = oracle.random_model(BY_NAME["llama-biases"].config(2))
    executor = compiled.executor(base)
    adapter = executor.add_adapter("mine", word)
    generator = torch.Generator().manual_seed(1)
    for tensor in adapter.tensors:
        tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=0.2)
    executor.refresh_adapter("mine")
    model, tensors = hooked(base, word, adapter.weights)
    sequences = prompts((9, 5))
    expected = [oracle.logits(of, s) for of, s in zip((model, base), sequences, strict=True)]
    executor.save_adapter("mine", tmp_path / "mine")
    executor.add_adapter("read", tmp_path / "mine")
    for name in ("mine", "read"):
        for found, logits in zip(executor.logits(sequences, [name, None]), expected, strict=True):
            assert oracle.relative_error(found, logits) < TOLERANCE

    runner = executor.training_runner("mine")
    examples = [Example(s, s) for s in sequences]
    loss = runner.forward_backward(examples, count := runner.count_targets(examples))
    expected_loss = sum(
        torch.nn.functional.cross_entropy(
            model(torch.tensor([s])).logits[0, :-1], torch.tensor(s[1:]), reduction="sum"
        )
        for s in sequences
    )
    (expected_loss / count).backward()
    assert loss == pytest.approx(expected_loss.item(), rel=TOLERANCE)
    for path, parameter in runner.parameters.items():
        module, _, suffix = path.rpartition(".")
        gradient = tensors[module][adapter.weights[module].suffixes.index(suffix)].grad
        assert oracle.relative_error(parameter.grad, gradient) < TOLERANCE, path


@pytest.mark.usefixtures("_registered")
def test_a_low_rank_method_merges() -> None:
    a, b, weight = (torch.randn(shape) for shape in ((3, 8), (6, 3), (6, 8)))
    merged = PlainWeights(a, b, scale=1.0).merged(weight, Around(lambda: weight, {}, (6, 8)))
    torch.testing.assert_close(merged, weight + b @ a)


@pytest.mark.usefixtures("_registered")
def test_names_of_methods_are_unique() -> None:
    assert "Affine" in str(pcg.explain(BY_NAME["llama3"].config(1), "affine").peft)
    with pytest.raises(AdapterError, match="AffineConfig: another method has 'AFFINE'; rename it"):
        registry.register(AffineConfig)
