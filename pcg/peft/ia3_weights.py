"""A module's (IA)³ vector.

    base_model.model.<module>.ia3_l      [out, 1], or [1, in] at a feedforward module

Source: `IA3Layer` of peft 0.21.2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from pcg.errors import AdapterError
from pcg.peft.ia3 import Ia3Recipe, Ia3Site
from pcg.peft.module_weights import AdapterWeight, Around, ModuleWeights, Shape


@dataclass(frozen=True, eq=False)
class Ia3Weights(ModuleWeights):
    """The bypass of one module: its input or its output is scaled.

    Attributes:
        vector: [in] at a feedforward module, else [out].
        is_feedforward: whether the input is scaled.
    """

    suffixes: ClassVar[tuple[str, ...]] = ("ia3_l",)

    vector: Tensor
    is_feedforward: bool

    @classmethod
    def fresh(
        cls,
        recipe: Ia3Recipe,
        site: Ia3Site,
        shape: Shape,
        generator: torch.Generator,
        around: Around,
    ) -> Self:
        size = shape[site.is_feedforward]
        vector = torch.ones(size) if recipe.init else torch.randn(size, generator=generator)
        return cls(vector, site.is_feedforward)

    @classmethod
    def read(cls, path: str, parts: Mapping[str, Tensor], recipe: Ia3Recipe) -> Self:
        (vector,) = parts.values()
        is_feedforward = recipe.site_of_target(path).is_feedforward
        ones = vector.shape[0 if is_feedforward else 1 :][:1]
        if vector.ndim != 2 or ones != (1,):
            expected = "[1, in]" if is_feedforward else "[out, 1]"
            role = "is" if is_feedforward else "is not"
            raise AdapterError(
                f"{path} has ia3_l {list(vector.shape)}; expected {expected}, as it {role} among "
                "feedforward_modules"
            )
        return cls(vector.flatten(), is_feedforward)

    @property
    def site(self) -> Ia3Site:
        return Ia3Site(self.is_feedforward)

    @property
    def stored(self) -> Mapping[str, Tensor]:
        shape = (1, -1) if self.is_feedforward else (-1, 1)
        return {"ia3_l": self.vector.reshape(shape)}

    @property
    def parameters(self) -> Mapping[str, AdapterWeight]:
        return {self._kind: AdapterWeight(self.vector)}

    @property
    def served(self) -> Mapping[str, Callable[[Around], Tensor]]:
        return {self._kind: lambda around: self.vector.unsqueeze(0)}

    @property
    def _kind(self) -> str:
        return "ia3_l_in" if self.is_feedforward else "ia3_l"

    def misfit(self, shape: Shape) -> str:
        fits = len(self.vector) == shape[self.is_feedforward]
        return "" if fits else f"ia3_l {list(self.stored['ia3_l'].shape)}"
