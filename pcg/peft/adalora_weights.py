"""A module's AdaLoRA.

    base_model.model.<module>.lora_A      [rank, in]
    base_model.model.<module>.lora_B      [out, rank]
    base_model.model.<module>.lora_E      [rank, 1]

A file holds the triplets that `rank_pattern` in its configuration keeps.

Source: `SVDLinear` and `AdaLoraModel.resize_state_dict_by_rank_pattern` of peft 0.21.2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from pcg.errors import AdapterError
from pcg.peft.adalora import AdaLoraRecipe, AdaLoraSite
from pcg.peft.module_weights import AdapterWeight, Around, ModuleWeights, Shape


@dataclass(frozen=True, eq=False)
class AdaLoraWeights(ModuleWeights):
    """The bypass of one module: y += scale · B (E ⊙ (A x)).

    Attributes:
        a: [rank, in].
        b: [out, rank].
        e: [rank, 1].
        scale: alpha / (rank at the start + 1e-5).
    """

    suffixes: ClassVar[tuple[str, ...]] = ("lora_A", "lora_B", "lora_E")

    a: Tensor
    b: Tensor
    e: Tensor
    scale: float

    @classmethod
    def fresh(
        cls,
        recipe: AdaLoraRecipe,
        site: AdaLoraSite,
        shape: Shape,
        generator: torch.Generator,
        around: Around,
    ) -> Self:
        out, in_ = shape
        deviation = 0.02 if recipe.init else 1.0
        a = deviation * torch.randn(site.rank, in_, generator=generator)
        b = deviation * torch.randn(out, site.rank, generator=generator)
        e = torch.zeros(site.rank, 1)
        if not recipe.init:
            e = torch.randn(site.rank, 1, generator=generator)
        return cls(a, b, e, site.scale)

    @classmethod
    def read(cls, path: str, parts: Mapping[str, Tensor], recipe: AdaLoraRecipe) -> Self:
        for part in cls.suffixes:
            if part not in parts:
                raise AdapterError(f"no {path}.{part}, the partner of another tensor there")
            if parts[part].ndim != 2:
                raise AdapterError(f"{path} has {part} {list(parts[part].shape)}; expected [n, m]")
        a, b, e = (parts[part] for part in cls.suffixes)
        site = recipe.site_of_target(path)
        if not a.shape[0] == b.shape[1] == len(e) == site.rank or e.shape[1] != 1:
            raise AdapterError(
                f"{path} has lora_A {list(a.shape)}, lora_B {list(b.shape)} and lora_E "
                f"{list(e.shape)}, and its configuration gives it rank {site.rank}; the two files "
                "are not of one save"
            )
        return cls(a, b, e, site.scale)

    @property
    def rank(self) -> int:
        return len(self.e)

    @property
    def site(self) -> AdaLoraSite:
        return AdaLoraSite(len(self.e), self.scale)

    @property
    def stored(self) -> Mapping[str, Tensor]:
        return dict(zip(self.suffixes, (self.a, self.b, self.e), strict=True))

    @property
    def parameters(self) -> Mapping[str, AdapterWeight]:
        return {f"ada{kind}": AdapterWeight(t, self.scale) for kind, t in self.stored.items()}

    @property
    def served(self) -> Mapping[str, Callable[[Around], Tensor]]:
        """LoRA's, of A with its rows scaled."""
        return {
            "lora_A": lambda around: self.a * self.e,
            "lora_B": lambda around: self.b.t() * self.scale,
        }

    @property
    def kept(self) -> Tensor:
        """Which triplets do something, [rank]."""
        return self.e[:, 0] != 0

    def pruned(self) -> Self:
        """Without the triplets that do nothing."""
        kept = self.kept
        return replace(self, a=self.a[kept], b=self.b[:, kept], e=self.e[kept])

    @property
    def out_features(self) -> int:
        return self.b.shape[0]

    def misfit(self, shape: Shape) -> str:
        if (self.b.shape[0], self.a.shape[1]) == shape:
            return ""
        return f"A {list(self.a.shape)} and B {list(self.b.shape)}"
