"""A module's LoRA.

    base_model.model.<module>.lora_A.weight      [rank, in]
    base_model.model.<module>.lora_B.weight      [out, rank]
    base_model.model.<module>.lora_B.bias        [out]   with lora_bias
    base_model.model.<module>.lora_magnitude_vector      [out]   with DoRA

Source: `LoraLayer` and `DoraLinearLayer` of peft 0.21.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from pcg.errors import AdapterError
from pcg.peft.lora import LoraRecipe, Site
from pcg.peft.module_weights import AdapterWeight, Around, ModuleWeights, Shape


@dataclass(frozen=True, eq=False)
class LoraWeights(ModuleWeights):
    """The bypass of one module: y += scale · (B (A x) + bias).

    Attributes:
        a: [rank, in].
        b: [out, rank].
        scale: alpha / rank, or alpha / √rank.
        bias: [out], B's own bias (`lora_bias`); most adapters have none.
        magnitude: [out], of DoRA.
    """

    suffixes: ClassVar[tuple[str, ...]] = (
        "lora_A.weight",
        "lora_B.weight",
        "lora_B.bias",
        "lora_magnitude_vector",
    )

    a: Tensor
    b: Tensor
    scale: float
    bias: Tensor | None = None
    magnitude: Tensor | None = None

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @classmethod
    def fresh(
        cls,
        recipe: LoraRecipe,
        site: Site,
        shape: Shape,
        generator: torch.Generator,
        around: Around,
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
        fresh = cls(a, b, site.scale, bias)
        return fresh if not site.use_dora else replace(fresh, magnitude=fresh._norm(around))

    @classmethod
    def read(cls, path: str, parts: Mapping[str, Tensor], recipe: LoraRecipe) -> Self:
        for part in ("lora_A.weight", "lora_B.weight"):
            if part not in parts:
                raise AdapterError(f"no {path}.{part}, the partner of another tensor there")
        a, b = parts["lora_A.weight"], parts["lora_B.weight"]
        bias, magnitude = parts.get("lora_B.bias"), parts.get("lora_magnitude_vector")
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
        if magnitude is not None and not recipe.use_dora:
            raise AdapterError(f"{path} has a DoRA magnitude, though use_dora is not set")
        if recipe.use_dora and (magnitude is None or magnitude.shape != b.shape[:1]):
            there = "no" if magnitude is None else f"{list(magnitude.shape)} as its"
            raise AdapterError(
                f"{path} has {there} lora_magnitude_vector with use_dora=True and lora_B "
                f"{list(b.shape)}"
            )
        return cls(a, b, site.scale, bias, magnitude)

    @property
    def site(self) -> Site:
        return Site(self.rank, self.scale, self.magnitude is not None, self.bias is not None)

    @property
    def stored(self) -> Mapping[str, Tensor]:
        tensors = (self.a, self.b, self.bias, self.magnitude)
        pairs = zip(self.suffixes, tensors, strict=True)
        return {suffix: tensor for suffix, tensor in pairs if tensor is not None}

    @property
    def parameters(self) -> Mapping[str, AdapterWeight]:
        tensors = {
            "lora_A": self.a,
            "lora_B": self.b,
            "lora_B_bias": self.bias,
            "lora_magnitude_vector": self.magnitude,
        }
        return {
            kind: AdapterWeight(tensor, self.scale)
            for kind, tensor in tensors.items()
            if tensor is not None
        }

    @property
    def served(self) -> Mapping[str, Callable[[Around], Tensor]]:
        made: dict[str, Callable[[Around], Tensor]] = {
            "lora_A": lambda around: self.a,
            "lora_B": lambda around: self.b.t() * self.scale,
        }
        bias, magnitude = self.bias, self.magnitude
        if bias is not None:
            made["lora_B_bias"] = lambda around: (bias * self.scale).unsqueeze(0)
        if magnitude is not None:
            made["lora_factor"] = lambda around: (magnitude / self._norm(around)).unsqueeze(0)
        return made

    def _norm(self, around: Around) -> Tensor:
        """||W + scale · B A|| of each output, [out], in the adapter's dtype; made by the base."""
        base = around.base()
        a, b = (matrix.to(base.device) for matrix in (self.a, self.b))
        whole = torch.addmm(base.to(a.dtype), b, a, alpha=self.scale)
        norm: Tensor = torch.linalg.vector_norm(whole, dim=1)
        return norm.to(self.a.device)

    @property
    def out_features(self) -> int:
        return self.b.shape[0]

    def misfit(self, shape: Shape) -> str:
        if (self.b.shape[0], self.a.shape[1]) == shape:
            return ""
        return f"A {list(self.a.shape)} and B {list(self.b.shape)}"
