"""VeRA: bypass networks of two random matrices that all modules share.

    y = W x + λ_b ⊙ B (λ_d ⊙ (A x)),   A: [rank, in],  B: [out, rank]

A and B are the first columns and rows of matrices as large as the largest adapted module, drawn
once from a seed and never trained; λ_d: [rank] and λ_b: [out] are each module's own.

    base_model.model.<module>.vera_lambda_b      [out]
    base_model.model.<module>.vera_lambda_d      [rank]
    base_model.vera_A                            [rank, largest in]     with save_projection
    base_model.vera_B                            [largest out, rank]    with save_projection

Source: `VeraConfig`, `VeraModel` and `VeraLayer` of peft 0.21.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pcg.ir.shapes import Shapes
from pcg.peft.lora import MadeLoraBypass
from pcg.peft.method import Place, Shape, low_rank
from pcg.peft.recipe import ALL_LINEAR, Names, saved_as
from pcg.peft.targets import FAMILY_TARGETS, TargetedRecipe
from pcg.peft.weights import SUMMAND, Around, Draw, ModuleWeights, ParameterKind

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class VeraBypass(MadeLoraBypass):
    """VeRA at a module: LoRA with A and B that training computes from shared matrices.

    A = vera_down(vera_A);  B = vera_up(vera_B, λ_b, λ_d)
    """

    def trained_shapes(self, out: int, in_: int) -> Shapes:
        return (out,), (self.rank,)

    def __str__(self) -> str:
        return f"VeRA of rank {self.rank}"

    def attach(self, at: Place, y: str) -> str:
        out, in_ = at.shape
        rows, columns = at.largest(VeraBypass)
        a = at.shared("vera_A", "vera_A", self.rank, columns)
        b = at.shared("vera_B", "vera_B", rows, self.rank)
        down = at.add("vera_down", "down", a, size=in_)
        vectors = at.adapter("vera_lambda_b", out), at.adapter("vera_lambda_d", self.rank)
        up = at.add("vera_up", "up", b, *vectors)
        return low_rank(at, y, at.dropped(), down, up, "vera_")


@dataclass(frozen=True, eq=False)
class VeraWeights(ModuleWeights):
    """VeRA's vectors of a module: λ_b [out] and λ_d [rank]."""

    suffixes: ClassVar[tuple[str, ...]] = ("vera_lambda_b", "vera_lambda_d")
    shared_names: ClassVar[tuple[str, ...]] = ("vera_A", "vera_B")
    kinds: ClassVar[Mapping[str, ParameterKind]] = dict.fromkeys(suffixes, SUMMAND)

    lambda_b: Tensor
    lambda_d: Tensor

    @classmethod
    def fresh(
        cls, recipe: VeraConfig, bypass: VeraBypass, shape: Shape, draw: Draw, around: Around
    ) -> Self:
        if recipe.init_weights:
            return cls(draw.zeros(shape[0]), draw.full(recipe.d_initial, bypass.rank))
        return cls(draw.full(1.0, shape[0]), draw.normal(bypass.rank))

    @classmethod
    def fresh_shared(cls, recipe: VeraConfig, shapes: Iterable[Shape]) -> Mapping[str, Tensor]:
        outs, ins = zip(*shapes, strict=True)
        draw, r = Draw(recipe.projection_prng_key), recipe.r
        sizes = {"vera_A": (r, max(ins)), "vera_B": (max(outs), r)}
        # Kaiming's bound with a gain of √2.
        return {name: draw.uniform(math.sqrt(6 / n), m, n) for name, (m, n) in sizes.items()}

    @classmethod
    def shared_is_stored(cls, recipe: VeraConfig) -> bool:
        return recipe.save_projection

    @property
    def rank(self) -> int:
        return len(self.lambda_d)

    @property
    def bypass(self) -> VeraBypass:
        return VeraBypass(len(self.lambda_d))

    @property
    def served(self) -> Mapping[str, Callable[[Around], Tensor]]:
        out = len(self.lambda_b)
        return {
            "lora_A": lambda around: around.shared["vera_A"][:, : around.shape[1]],
            "lora_B": lambda around: (
                (around.shared["vera_B"][:out] * self.lambda_d).t() * self.lambda_b
            ),
        }

    @property
    def module_shape(self) -> tuple[int, None]:
        return len(self.lambda_b), None


@dataclass(frozen=True, kw_only=True)
class VeraConfig(TargetedRecipe):
    """A VeRA configuration, with peft's fields and defaults.

    Attributes:
        layers_to_transform: the only adapted layers; None is all. Not with a regex.
        layers_pattern: names of the module list that a layer's index follows; None is any.
        bias: trained biases of the base: "none", "all", or "vera_only", those of the adapted
            modules.
        vera_dropout: probability that an element of a module's input is dropped in training.
        r: the rank of the shared matrices.
        projection_prng_key: the seed of the shared matrices.
        save_projection: save the shared matrices in the adapter's file; otherwise they are redrawn.
        d_initial: the initial value of λ_d.
        init_weights: True, λ_d constant and λ_b zero, which changes nothing; False, normal and
            ones.
    """

    method: ClassVar[str] = "VeRA"
    peft_type: ClassVar[str] = "VERA"
    weights: ClassVar[type[ModuleWeights]] = VeraWeights
    shorthands: ClassVar[Mapping[str, Mapping[str, Any]]] = {"vera": {"target_modules": ALL_LINEAR}}
    rank_field: ClassVar[str] = "r"
    dropout_field: ClassVar[str] = "vera_dropout"
    biases: ClassVar[Names] = ("none", "all", "vera_only")
    # TRANSFORMERS_MODELS_TO_VERA_TARGET_MODULES_MAPPING in peft 0.21.2.
    family_targets: ClassVar[Mapping[str, Names]] = {**FAMILY_TARGETS, "phi": ("q_proj", "v_proj")}

    layers_to_transform: Sequence[int] | None = None
    layers_pattern: Names | None = None
    bias: str = "none"
    vera_dropout: float = saved_as("dropout", 0.0)
    r: int = saved_as("rank", 256)
    projection_prng_key: int = saved_as("seed", 0)
    save_projection: bool = saved_as("saves_projection", True)
    d_initial: float = saved_as("initial_d", 0.1)
    init_weights: bool = saved_as("init", True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_ints(1, "r")
        self._check_ints(0, "projection_prng_key")
        self._check_finite("d_initial")
        self._check_flags("save_projection", "init_weights")

    def bypass_at(self, path: str) -> VeraBypass:
        return VeraBypass(self.r)
