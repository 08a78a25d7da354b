"""A module's VeRA vectors, and the matrices that all modules of an adapter share.

    base_model.model.<module>.vera_lambda_b      [out]
    base_model.model.<module>.vera_lambda_d      [rank]
    base_model.vera_A                            [rank, largest in]     with save_projection
    base_model.vera_B                            [largest out, rank]    with save_projection

Source: `VeraModel` and `VeraLayer` of peft 0.21.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from pcg.errors import AdapterError
from pcg.peft.module_weights import AdapterWeight, Around, ModuleWeights, Shape
from pcg.peft.vera import VeraRecipe, VeraSite


@dataclass(frozen=True, eq=False)
class VeraWeights(ModuleWeights):
    """The bypass of one module: y += lambda_b ⊙ B (lambda_d ⊙ (A x)).

    Attributes:
        lambda_b: [out].
        lambda_d: [rank].
    """

    suffixes: ClassVar[tuple[str, ...]] = ("vera_lambda_b", "vera_lambda_d")
    shared_names: ClassVar[tuple[str, ...]] = ("vera_A", "vera_B")

    lambda_b: Tensor
    lambda_d: Tensor

    @classmethod
    def fresh(
        cls,
        recipe: VeraRecipe,
        site: VeraSite,
        shape: Shape,
        generator: torch.Generator,
        around: Around,
    ) -> Self:
        if recipe.init:
            return cls(torch.zeros(shape[0]), torch.full((site.rank,), recipe.initial_d))
        return cls(torch.ones(shape[0]), torch.randn(site.rank, generator=generator))

    @classmethod
    def fresh_shared(cls, recipe: VeraRecipe, shapes: Iterable[Shape]) -> Mapping[str, Tensor]:
        outs, ins = zip(*shapes, strict=True)
        generator = torch.Generator().manual_seed(recipe.seed)
        made = {}
        for name, shape in (
            ("vera_A", (recipe.rank, max(ins))),
            ("vera_B", (max(outs), recipe.rank)),
        ):
            bound = math.sqrt(6 / shape[1])  # Kaiming's, with a gain of √2
            made[name] = torch.empty(shape).uniform_(-bound, bound, generator=generator)
        return made

    @classmethod
    def shared_is_stored(cls, recipe: VeraRecipe) -> bool:
        return recipe.saves_projection

    @classmethod
    def read(cls, path: str, parts: Mapping[str, Tensor], recipe: VeraRecipe) -> Self:
        for part in cls.suffixes:
            if part not in parts:
                raise AdapterError(f"no {path}.{part}, the partner of another tensor there")
            if parts[part].ndim != 1:
                raise AdapterError(f"{path} has {part} {list(parts[part].shape)}; expected [n]")
        lambda_b, lambda_d = (parts[part] for part in cls.suffixes)
        if len(lambda_d) != recipe.rank:
            raise AdapterError(
                f"{path} has rank {len(lambda_d)}, and its configuration gives it {recipe.rank}; "
                "the two files are not of one save"
            )
        return cls(lambda_b, lambda_d)

    @property
    def rank(self) -> int:
        return len(self.lambda_d)

    @property
    def site(self) -> VeraSite:
        return VeraSite(len(self.lambda_d))

    @property
    def stored(self) -> Mapping[str, Tensor]:
        return {"vera_lambda_b": self.lambda_b, "vera_lambda_d": self.lambda_d}

    @property
    def parameters(self) -> Mapping[str, AdapterWeight]:
        return {kind: AdapterWeight(tensor) for kind, tensor in self.stored.items()}

    @property
    def served(self) -> Mapping[str, Callable[[Around], Tensor]]:
        """LoRA's, as the shared matrices with the vectors are LoRA's of scale 1."""
        return {
            "lora_A": lambda around: around.shared["vera_A"][:, : around.shape[1]],
            "lora_B": self._up,
        }

    def _up(self, around: Around) -> Tensor:
        b = around.shared["vera_B"][: len(self.lambda_b)]
        return (b * self.lambda_d).t() * self.lambda_b

    @property
    def out_features(self) -> int:
        return len(self.lambda_b)

    def misfit(self, shape: Shape) -> str:
        return "" if len(self.lambda_b) == shape[0] else f"vera_lambda_b {[len(self.lambda_b)]}"
