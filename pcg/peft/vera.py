"""A VeRA recipe: which linear modules get a bypass made of two random matrices that all share.

    y = W x + λ_b ⊙ B (λ_d ⊙ (A x)),   A: [rank, in],  B: [out, rank]

A and B are the first columns and rows of matrices as large as the largest adapted module, drawn
once from a seed and never trained; λ_d: [rank] and λ_b: [out] are each module's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from pcg.errors import AdapterError
from pcg.ir.shapes import Shapes
from pcg.peft.lora import FAMILY_TARGETS as LORA_TARGETS
from pcg.peft.targets import TargetRecipe

# The decoders among TRANSFORMERS_MODELS_TO_VERA_TARGET_MODULES_MAPPING in peft 0.21.2.
FAMILY_TARGETS: Mapping[str, tuple[str, ...]] = {**LORA_TARGETS, "phi": ("q_proj", "v_proj")}


@dataclass(frozen=True, slots=True)
class VeraSite:
    """The bypass of one module."""

    rank: int

    def trained_shapes(self, out: int, in_: int) -> Shapes:
        """Of what is trained at a module [out, in]; A and B are not."""
        return (out,), (self.rank,)

    def __str__(self) -> str:
        return f"VeRA of rank {self.rank}"


@dataclass(frozen=True)
class VeraRecipe(TargetRecipe[VeraSite]):
    """The compiler's view of a VeRA configuration; the defaults are peft's.

    Attributes:
        rank: of the shared matrices.
        seed: that they are drawn from (`projection_prng_key`).
        saves_projection: whether they stand in the adapter's file, or are drawn anew.
        initial_d: what λ_d begins as.
        init: True, λ_d constant and λ_b zero, which changes nothing; False, normal and ones.
    """

    method: ClassVar[str] = "VeRA"
    peft_type: ClassVar[str] = "VERA"
    biases: ClassVar[tuple[str, ...]] = ("none", "all", "vera_only")
    family_targets: ClassVar[Mapping[str, tuple[str, ...]]] = FAMILY_TARGETS

    rank: int = 256
    seed: int = 0
    saves_projection: bool = True
    initial_d: float = 0.1
    init: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("rank", 1), ("seed", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise AdapterError(f"{name}={value!r}; use an int of at least {least}")
        if not isinstance(self.initial_d, int | float) or isinstance(self.initial_d, bool):
            raise AdapterError(f"initial_d={self.initial_d!r}; use a number")
        for name in ("saves_projection", "init"):
            if not isinstance(getattr(self, name), bool):
                raise AdapterError(f"{name}={getattr(self, name)!r}; use True or False")

    def site_of_target(self, path: str) -> VeraSite:
        return VeraSite(self.rank)
