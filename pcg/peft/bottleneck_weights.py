"""A module's bottleneck adapter; the keys are pcg's own.

base_model.model.<module>.adapter_down.weight      [size, in]
base_model.model.<module>.adapter_down.bias        [size]
base_model.model.<module>.adapter_up.weight        [out, size]
base_model.model.<module>.adapter_up.bias          [out]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from pcg.errors import AdapterError
from pcg.peft.bottleneck import BottleneckRecipe, BottleneckSite
from pcg.peft.module_weights import AdapterWeight, Around, ModuleWeights, Shape


@dataclass(frozen=True, eq=False)
class BottleneckWeights(ModuleWeights):
    """The adapter of one module: y += scaling · (up σ(down x + down_bias) + up_bias).

    Attributes:
        down: [size, in].
        down_bias: [size].
        up: [out, size].
        up_bias: [out].
        does: σ, the scaling, and whether x is the MLP's input or the module's output.
    """

    suffixes: ClassVar[tuple[str, ...]] = (
        "adapter_down.weight",
        "adapter_down.bias",
        "adapter_up.weight",
        "adapter_up.bias",
    )

    down: Tensor
    down_bias: Tensor
    up: Tensor
    up_bias: Tensor
    does: BottleneckSite

    @classmethod
    def fresh(
        cls,
        recipe: BottleneckRecipe,
        site: BottleneckSite,
        shape: Shape,
        generator: torch.Generator,
        around: Around,
    ) -> Self:
        """As nn.Linear begins going down, and zeros going up, which change nothing.

        All that is read has as many features as what is written, as a layer's residuals have.
        """
        out = shape[0]
        down, bound = torch.empty(site.size, out), 1 / math.sqrt(out)
        torch.nn.init.kaiming_uniform_(down, a=math.sqrt(5), generator=generator)
        down_bias = torch.empty(site.size).uniform_(-bound, bound, generator=generator)
        return cls(down, down_bias, torch.zeros(out, site.size), torch.zeros(out), site)

    @classmethod
    def read(cls, path: str, parts: Mapping[str, Tensor], recipe: BottleneckRecipe) -> Self:
        for part in cls.suffixes:
            if part not in parts:
                raise AdapterError(f"no {path}.{part}, the partner of another tensor there")
        down, down_bias, up, up_bias = (parts[part] for part in cls.suffixes)
        site = recipe.site_of_target(path)
        out, size = len(up_bias), site.size
        expected = ((size, out), (size,), (out, size), (out,))
        for part, shape in zip(cls.suffixes, expected, strict=True):
            if parts[part].shape != shape:
                raise AdapterError(
                    f"{path} has {part} {list(parts[part].shape)}; expected {list(shape)}, as "
                    f"bottleneck_size={size} and adapter_up.bias has {out} elements"
                )
        return cls(down, down_bias, up, up_bias, site)

    @property
    def site(self) -> BottleneckSite:
        return self.does

    @property
    def stored(self) -> Mapping[str, Tensor]:
        return dict(zip(self.suffixes, self.tensors, strict=True))

    @property
    def parameters(self) -> Mapping[str, AdapterWeight]:
        scaling = self.does.scaling
        return {
            f"{self._kind}_down": AdapterWeight(self.down),
            f"{self._kind}_down_bias": AdapterWeight(self.down_bias),
            f"{self._kind}_up": AdapterWeight(self.up, scaling),
            f"{self._kind}_up_bias": AdapterWeight(self.up_bias, scaling),
        }

    @property
    def served(self) -> Mapping[str, Callable[[Around], Tensor]]:
        scaling = self.does.scaling
        return {
            f"{self._kind}_down": lambda around: self.down,
            f"{self._kind}_down_bias": lambda around: self.down_bias.unsqueeze(0),
            f"{self._kind}_up": lambda around: self.up.t() * scaling,
            f"{self._kind}_up_bias": lambda around: (self.up_bias * scaling).unsqueeze(0),
        }

    @property
    def _kind(self) -> str:
        parallel = "_parallel" if self.does.is_parallel else ""
        return f"{self.does.non_linearity}{parallel}_adapter"

    @property
    def inner_size(self) -> int:
        return len(self.down)

    @property
    def out_features(self) -> int:
        return len(self.up_bias)

    def misfit(self, shape: Shape) -> str:
        return "" if len(self.up_bias) == shape[0] else f"adapter_up {list(self.up.shape)}"
