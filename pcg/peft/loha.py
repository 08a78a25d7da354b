"""LoHa: the Hadamard product of two low-rank products, parallel to a linear module (FedPara).

    y = W x + scale · ((w1_a w1_b) ⊙ (w2_a w2_b)) x,   w_a: [out, r],  w_b: [r, in]
    scale = alpha / r

A Hadamard product of products of rank r is a product of rank r², with the pairwise products of rows
and of columns (Khatri-Rao),

    (w1_a w1_b) ⊙ (w2_a w2_b) = B A,   A[j r + k, :] = w1_b[j, :] ⊙ w2_b[k, :]
                                       B[:, j r + k] = w1_a[:, j] ⊙ w2_a[:, k]

so that no matrix [out, in] exists, and serving has LoRA of rank r².

    base_model.model.<module>.hada_w1_a      [out, r]
    base_model.model.<module>.hada_w1_b      [r, in]
    base_model.model.<module>.hada_w2_a      [out, r]
    base_model.model.<module>.hada_w2_b      [r, in]

peft adapts no Conv1D (GPT-2) with it; pcg does.

Source: `LoHaConfig` and `LoHaLayer` of peft 0.21.2; "FedPara: Low-Rank Hadamard Product for
Communication-Efficient Federated Learning" (Hyeon-Woo et al. 2022).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pcg.errors import UnsupportedError
from pcg.ir.shapes import Shapes
from pcg.peft.lora import MadeLoraBypass
from pcg.peft.method import Place, Shape, Shards, low_rank
from pcg.peft.recipe import ALL_LINEAR, COMMON, Names, OtherField, note, refused
from pcg.peft.targets import FAMILY_TARGETS, PatternedRecipe
from pcg.peft.weights import AdapterWeight, Around, Draw, ModuleWeights, ParameterKind

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LohaBypass(MadeLoraBypass):
    """LoHa at a module: LoRA with A and B that training computes from the four factors.

        A = khatri_rao(w1_b, w2_b) of rows;  B = khatri_rao(w1_a, w2_a) of columns

    Attributes:
        scale: the factor on the product.
    """

    scale: float

    def trained_shapes(self, out: int, in_: int) -> Shapes:
        return ((out, self.rank), (self.rank, in_)) * 2

    def __str__(self) -> str:
        return f"LoHa of rank {self.rank} with scale {self.scale:g}"

    def attach(self, at: Place, y: str) -> str:
        out, in_ = at.shape
        down = [at.adapter(f"hada_w{i}_b", self.rank, in_) for i in (1, 2)]
        up = [at.adapter(f"hada_w{i}_a", out, self.rank) for i in (1, 2)]
        a = at.add("khatri_rao", "loha_down", *down, dim=-2)
        b = at.add("khatri_rao", "loha_up", *up, dim=-1)
        return low_rank(at, y, at.inputs[0], a, b, "loha_")


@dataclass(frozen=True, eq=False)
class LohaWeights(ModuleWeights):
    """LoHa's weights of a module: y += scale · ((w1_a w1_b) ⊙ (w2_a w2_b)) x."""

    suffixes: ClassVar[tuple[str, ...]] = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
    kinds: ClassVar[Mapping[str, ParameterKind]] = {
        "hada_w1_a": ParameterKind(),
        "hada_w1_b": ParameterKind(),
        "hada_w2_a": ParameterKind(),
        "hada_w2_b": ParameterKind(),
    }

    w1_a: Tensor
    w1_b: Tensor
    w2_a: Tensor
    w2_b: Tensor
    scale: float

    @classmethod
    def fresh(
        cls, recipe: LoHaConfig, bypass: LohaBypass, shape: Shape, draw: Draw, around: Around
    ) -> Self:
        (out, in_), r = shape, bypass.rank
        w1_a, w1_b, w2_a = draw.linear(out, r), draw.linear(r, in_), draw.linear(out, r)
        w2_b = draw.zeros(r, in_) if recipe.init_weights else draw.linear(r, in_)
        return cls(w1_a, w1_b, w2_a, w2_b, bypass.scale)

    @classmethod
    def of(cls, bypass: LohaBypass, *tensors: Tensor) -> Self:
        w1_a, w1_b, w2_a, w2_b = tensors
        return cls(w1_a, w1_b, w2_a, w2_b, bypass.scale)

    @property
    def rank(self) -> int:
        return len(self.w1_b) ** 2

    @property
    def bypass(self) -> LohaBypass:
        return LohaBypass(len(self.w1_b), self.scale)

    @property
    def parameters(self) -> Mapping[str, AdapterWeight]:
        """The factors; the first has the scale of the product."""
        return {**super().parameters, "hada_w1_a": AdapterWeight(self.w1_a, self.scale)}

    @property
    def served(self) -> Mapping[str, Callable[[Around], Tensor]]:
        a1, a2 = self.w1_a.t(), self.w2_a.t()
        return {
            "lora_A": lambda around: (self.w1_b.unsqueeze(1) * self.w2_b).flatten(0, 1),
            "lora_B": lambda around: (a1.unsqueeze(1) * (a2 * self.scale)).flatten(0, 1),
        }

    @property
    def module_shape(self) -> Shape:
        return len(self.w1_a), self.w1_b.shape[-1]


@dataclass(frozen=True, kw_only=True)
class LoHaConfig(PatternedRecipe):
    """A LoHa configuration, with peft's fields and defaults.

    Attributes:
        r: the rank of modules that no key of `rank_pattern` matches.
        alpha: numerator of the scale of modules that no key of `alpha_pattern` matches.
        rank_dropout: probability that an output of ΔW is dropped in training; pcg does not support
            it.
        module_dropout: probability that a step skips a module; pcg does not support it.
        init_weights: True, a factor is zero, which changes nothing; False, no factor is zero.
    """

    method: ClassVar[str] = "LoHa"
    peft_type: ClassVar[str] = "LOHA"
    weights: ClassVar[type[ModuleWeights]] = LohaWeights
    shorthands: ClassVar[Mapping[str, Mapping[str, Any]]] = {"loha": {"target_modules": ALL_LINEAR}}
    other_fields: ClassVar[Mapping[str, OtherField]] = {
        **COMMON,
        "modules_to_save": refused("whole modules trained beside the adapter"),
        "use_effective_conv2d": note(False),  # linear modules have no kernel
    }
    rank_field: ClassVar[str] = "r"
    family_targets: ClassVar[Mapping[str, Names]] = FAMILY_TARGETS
    alpha_field: ClassVar[str] = "alpha"

    r: int = 8
    alpha: float = 8
    rank_dropout: float = 0.0
    module_dropout: float = 0.0
    init_weights: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_probabilities("rank_dropout", "module_dropout")
        self._check_flags("init_weights")

    @property
    def one_rank(self) -> None:
        """None, as the saved values of a step are not linear in r: A and B have the rank r²."""
        return None

    def bypass_at(self, path: str) -> LohaBypass:
        rank, alpha = self.rank_and_alpha(path)
        return LohaBypass(rank, alpha / rank)

    def training_beside(self, shards: Shards, total_steps: int) -> None:
        for name in ("rank_dropout", "module_dropout"):
            if getattr(self, name):
                raise UnsupportedError(
                    f"{name}={getattr(self, name):g}: pcg trains LoHa without dropout; use "
                    f"{name}=0, or train it with peft"
                )
