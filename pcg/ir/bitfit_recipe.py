"""A BitFit recipe: all biases of the base are trained, and nothing else (Ben Zaken et al. 2022)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from pcg.ir.target_recipe import TargetRecipe


@dataclass(frozen=True)
class BitfitRecipe(TargetRecipe[None]):
    """There is nothing to choose: no module gets a bypass, and every bias is trained."""

    method: ClassVar[str] = "BitFit"
    peft_type: ClassVar[str] = "BITFIT"
    biases: ClassVar[tuple[str, ...]] = ("all",)

    bias: str = "all"

    def site(
        self, path: str, *, output_layer: str | None = None, model_type: str | None = None
    ) -> None:
        return None

    def sites(
        self,
        paths: Sequence[str],
        output_layer: str | None = None,
        model_type: str | None = None,
        others: Collection[str] = (),
    ) -> dict[str, None]:
        return {}

    def resolved(
        self,
        paths: Sequence[str],
        output_layer: str | None = None,
        model_type: str | None = None,
    ) -> Self:
        return self
