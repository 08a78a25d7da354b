"""A BitFit recipe: all biases of the base are trained, and nothing else (Ben Zaken et al. 2022)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from pcg.peft.untargeted import UntargetedRecipe


@dataclass(frozen=True)
class BitfitRecipe(UntargetedRecipe[None]):
    """There is nothing to choose: no module gets a bypass, and every bias is trained."""

    method: ClassVar[str] = "BitFit"
    peft_type: ClassVar[str] = "BITFIT"
    biases: ClassVar[tuple[str, ...]] = ("all",)

    bias: str = "all"

    def site_of_target(self, path: str) -> None:
        return None

    def places(self, paths: Sequence[str]) -> Sequence[str]:
        return ()
