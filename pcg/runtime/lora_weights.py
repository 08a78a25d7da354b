"""A module's LoRA.

    base_model.model.<module>.lora_A.weight      [rank, in]
    base_model.model.<module>.lora_B.weight      [out, rank]
    base_model.model.<module>.lora_B.bias        [out]   with lora_bias

Source: `LoraLayer` of peft 0.21.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from pcg.errors import AdapterError
from pcg.ir.recipe import LoraRecipe, Site
from pcg.runtime.module_weights import AdapterWeight, ModuleWeights, Shape


@dataclass(frozen=True, eq=False)
class LoraWeights(ModuleWeights):
    """The bypass of one module: y += scale · (B (A x) + bias).

    Attributes:
        a: [rank, in].
        b: [out, rank].
        scale: alpha / rank, or alpha / √rank.
        bias: [out], B's own bias (`lora_bias`); most adapters have none.
    """

    suffixes: ClassVar[tuple[str, ...]] = ("lora_A.weight", "lora_B.weight", "lora_B.bias")

    a: Tensor
    b: Tensor
    scale: float
    bias: Tensor | None = None

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @classmethod
    def fresh(
        cls,
        recipe: LoraRecipe,
        site: Site,
        shape: Shape,
        dtype: torch.dtype,
        generator: torch.Generator,
    ) -> Self:
        out, in_ = shape
        a, b = torch.empty(site.rank, in_), torch.zeros(out, site.rank)
        bias = torch.zeros(out) if recipe.lora_bias else None
        if isinstance(recipe.init, str):
            torch.nn.init.normal_(a, std=1 / site.rank, generator=generator)
        else:
            torch.nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
        if recipe.init is False:  # as nn.Linear starts
            torch.nn.init.kaiming_uniform_(b, a=math.sqrt(5), generator=generator)
            if bias is not None:
                bound = 1 / math.sqrt(site.rank)
                torch.nn.init.uniform_(bias, -bound, bound, generator=generator)
        return cls(a, b, site.scale, bias).map(lambda tensor: tensor.to(dtype))

    @classmethod
    def read(cls, path: str, parts: Mapping[str, Tensor], recipe: LoraRecipe) -> Self:
        for part in ("lora_A.weight", "lora_B.weight"):
            if part not in parts:
                raise AdapterError(f"no {path}.{part}, the partner of another tensor there")
        a, b = parts["lora_A.weight"], parts["lora_B.weight"]
        bias = parts.get("lora_B.bias")
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
            raise AdapterError(
                f"{path} has lora_A {list(a.shape)} and lora_B {list(b.shape)}; expected "
                "[rank, in] and [out, rank]"
            )
        site = recipe.site_of_target(path)
        if a.shape[0] != site.rank:
            many = len(recipe.rank_pattern) > 1
            raise AdapterError(
                f"{path} has rank {a.shape[0]}, and its configuration gives it {site.rank}, so "
                "that its scale is not known; the two files are not of one save"
                + (", or rank_pattern was in another order (peft sorts the keys)" if many else "")
            )
        if (bias is not None) != recipe.lora_bias or (
            bias is not None and bias.shape != b.shape[:1]
        ):
            shape = "no lora_B.bias" if bias is None else f"a lora_B.bias {list(bias.shape)}"
            raise AdapterError(
                f"{path} has {shape} with lora_bias={recipe.lora_bias} and lora_B {list(b.shape)}"
            )
        return cls(a, b, site.scale, bias)

    @property
    def site(self) -> Site:
        return Site(self.rank, self.scale)

    @property
    def stored(self) -> Mapping[str, Tensor]:
        return dict(zip(self.suffixes, self.tensors, strict=False))

    @property
    def parameters(self) -> Mapping[str, AdapterWeight]:
        return {
            "lora_A": AdapterWeight(self.a, self.scale),
            "lora_B": AdapterWeight(self.b, self.scale),
        }

    @property
    def served(self) -> Mapping[str, Callable[[], Tensor]]:
        return {"lora_A": lambda: self.a, "lora_B": lambda: self.b.t() * self.scale}

    @property
    def out_features(self) -> int:
        return self.b.shape[0]

    def misfit(self, shape: Shape) -> str:
        if (self.b.shape[0], self.a.shape[1]) == shape:
            return ""
        return f"A {list(self.a.shape)} and B {list(self.b.shape)}"
