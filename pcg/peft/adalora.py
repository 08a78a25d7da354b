"""AdaLoRA: LoRA with singular values, of which training keeps the important ones.

    y = W x + scale · B (E ⊙ (A x)),   A: [rank, in],  E: [rank, 1],  B: [out, rank]
    scale = alpha / (rank at the start + 1e-5)

Each row of A, with its E and its column of B, is a triplet. All modules begin with the same rank;
training leaves as many triplets of the whole adapter as `target_r` of each module would be, and
`rank_pattern` says which (Zhang et al. 2023). A and B are drawn towards orthogonal rows and columns
by a loss beside the data's. What training does beside the program is `rank_allocator.py`, a file of
its own, as the two are more than one should be.

    base_model.model.<module>.lora_A      [rank, in]
    base_model.model.<module>.lora_B      [out, rank]
    base_model.model.<module>.lora_E      [rank, 1]

A file holds the triplets that `rank_pattern` in its configuration keeps.

Source: `AdaLoraConfig`, `SVDLinear` and `AdaLoraModel` of peft 0.21.2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pcg.errors import AdapterError, FinetuneError
from pcg.ir.types import Shapes
from pcg.peft.lora import LORA_FIELDS, MadeLoraBypass
from pcg.peft.method import Place, Shape, Shards, TrainingBeside, low_rank
from pcg.peft.rank_allocator import RankAllocator, Schedule
from pcg.peft.recipe import ALL_LINEAR, Json, Names, OtherField, note, refused, saved_as
from pcg.peft.targets import FAMILY_TARGETS as LORA_TARGETS
from pcg.peft.targets import LayeredRecipe
from pcg.peft.weights import (
    DOWN,
    UP,
    AdapterWeight,
    Around,
    Draw,
    LowRankWeights,
    ModuleWeights,
    ParameterKind,
)

if TYPE_CHECKING:
    from torch import Tensor

# The decoders among TRANSFORMERS_MODELS_TO_ADALORA_TARGET_MODULES_MAPPING in peft 0.21.2.
_FAMILIES = (
    "bloom", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj",
    "llama", "qwen2", "qwen3",
)  # fmt: skip
FAMILY_TARGETS: Mapping[str, Names] = {
    **{family: LORA_TARGETS[family] for family in _FAMILIES},
    "opt": ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"),
}
EPSILON = 1e-5
"""The number that peft adds to the rank that it divides by."""
_KEY = ".lora_E"
_RANK_DIMS = {"adalora_A": 0, "adalora_B": 1, "adalora_E": 0}


@dataclass(frozen=True)
class AdaLoraBypass(MadeLoraBypass):
    """AdaLoRA beside one module: LoRA, whose A has singular values, which serving has in A.

        A' = singular_down(A, E)

    Attributes:
        scale: the factor on the product.
    """

    scale: float

    def trained_shapes(self, out: int, in_: int) -> Shapes:
        return (self.rank, in_), (out, self.rank), (self.rank, 1)

    def __str__(self) -> str:
        return f"AdaLoRA of rank {self.rank} with scale {self.scale:g}"

    def attach(self, at: Place, y: str) -> str:
        out, in_ = at.shape
        a, e = at.adapter("adalora_A", self.rank, in_), at.adapter("adalora_E", self.rank, 1)
        down = at.add("singular_down", "adalora_down", a, e)
        b = at.adapter("adalora_B", out, self.rank)
        return low_rank(at, y, at.dropped(), down, b, "adalora_")


@dataclass(frozen=True, eq=False)
class AdaLoraWeights(LowRankWeights):
    """AdaLoRA's weights of one module: y += scale · B (E ⊙ (A x)), E: [rank, 1]."""

    suffixes: ClassVar[tuple[str, ...]] = ("lora_A", "lora_B", "lora_E")
    kinds: ClassVar[Mapping[str, ParameterKind]] = {
        "adalora_A": DOWN,
        "adalora_B": UP,
        "adalora_E": ParameterKind(),
    }

    e: Tensor

    @classmethod
    def fresh(
        cls, recipe: AdaLoraConfig, bypass: AdaLoraBypass, shape: Shape, draw: Draw, around: Around
    ) -> Self:
        (out, in_), rank = shape, bypass.rank
        deviation = 0.02 if recipe.init_lora_weights else 1.0
        a, b = deviation * draw.normal(rank, in_), deviation * draw.normal(out, rank)
        e = draw.zeros(rank, 1) if recipe.init_lora_weights else draw.normal(rank, 1)
        return cls(a, b, bypass.scale, e)

    @classmethod
    def of(cls, bypass: AdaLoraBypass, *tensors: Tensor) -> Self:
        a, b, e = tensors
        return cls(a, b, bypass.scale, e)

    @property
    def bypass(self) -> AdaLoraBypass:
        return AdaLoraBypass(len(self.e), self.scale)

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
        """The triplets that do something: [rank], bool."""
        return self.e[:, 0] != 0

    def pruned(self) -> Self:
        """The weights without the triplets that do nothing."""
        kept = self.kept
        return replace(self, a=self.a[kept], b=self.b[:, kept], e=self.e[kept])


@dataclass(frozen=True, kw_only=True)
class AdaLoraConfig(LayeredRecipe):
    """An AdaLoRA configuration, with peft's fields and defaults.

    Attributes:
        bias: biases of the base that are trained: "none", "all", or "lora_only", those of the
            adapted modules.
        lora_dropout: probability that an element of a module's input is dropped in training.
        init_r: the rank of every module at the start.
        target_r: the rank of a module on average at the end.
        lora_alpha: numerator of the scale.
        tinit: steps until the first triplet goes.
        tfinal: steps after the last one has gone.
        deltaT: steps from one allocation to the next.
        beta1: decay of the moving average of importance.
        beta2: decay of that of its deviation.
        orth_reg_weight: weight of the loss that draws A and B towards orthogonal ones.
        total_step: steps of the whole schedule; None is finetuning's own number.
        rank_pattern: which of the first triplets of each module are left, by its path and
            `.lora_E`; None where all are.
        init_lora_weights: True, A and B are normal and E zero, which changes nothing; False, all
            are normal.
    """

    method: ClassVar[str] = "AdaLoRA"
    peft_type: ClassVar[str] = "ADALORA"
    weights: ClassVar[type[ModuleWeights]] = AdaLoraWeights
    shorthands: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "adalora": {"target_modules": ALL_LINEAR}
    }
    other_fields: ClassVar[Mapping[str, OtherField]] = {
        **LORA_FIELDS,
        "alpha_pattern": refused("alphas of modules", {}),
        "lora_bias": refused("a bias on B", False),
        "r": note(8),  # init_r is the rank; peft ignores this one
        "use_dora": refused("DoRA", False),
        "use_rslora": refused("rank-stabilised scales", False),
    }
    rank_field: ClassVar[str] = "init_r"
    dropout_field: ClassVar[str] = "lora_dropout"
    trains_beside: ClassVar[bool] = True
    biases: ClassVar[Names] = ("none", "all", "lora_only")
    family_targets: ClassVar[Mapping[str, Names]] = FAMILY_TARGETS

    bias: str = "none"
    lora_dropout: float = saved_as("dropout", 0.0)
    init_r: int = saved_as("rank", 12)
    target_r: int = saved_as("target_rank", 8)
    lora_alpha: float = saved_as("alpha", 8)
    tinit: int = saved_as("steps_before", 0)
    tfinal: int = saved_as("steps_after", 0)
    deltaT: int = saved_as("interval", 1)
    beta1: float = 0.85
    beta2: float = 0.85
    orth_reg_weight: float = saved_as("orthogonality", 0.5)
    total_step: int | None = saved_as("steps", None)
    rank_pattern: Mapping[str, Sequence[bool]] | None = field(
        default=None, hash=False, metadata={"saved": "kept"}
    )
    init_lora_weights: bool = saved_as("init", True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_ints(1, "init_r", "target_r", "deltaT")
        self._check_ints(0, "tinit", "tfinal")
        self._check_ints(1, "total_step", optional=True)
        self._check_finite("lora_alpha", "beta1", "beta2", "orth_reg_weight")
        self._check(["lora_alpha"], "a number above 0", lambda alpha: alpha > 0)
        self._check(["orth_reg_weight"], "a number of at least 0", lambda weight: weight >= 0)
        self._check(["beta1", "beta2"], "a number between 0 and 1", lambda beta: 0 < beta < 1)
        self._check_flags("init_lora_weights")
        if self.total_step is not None and self.tinit >= self.total_step - self.tfinal:
            raise AdapterError(
                f"tinit={self.tinit}, tfinal={self.tfinal} and total_step={self.total_step} "
                "leave no step to allocate ranks in; lower the first two, or raise total_step"
            )
        if self.rank_pattern is not None:
            self._check_pattern(self.rank_pattern)

    def _check_pattern(self, pattern: Mapping[str, Sequence[bool]]) -> None:
        if not isinstance(pattern, Mapping):
            raise AdapterError(f"rank_pattern={pattern!r}; use an object")
        kept = {key: tuple(which) for key, which in pattern.items()}
        object.__setattr__(self, "rank_pattern", kept)
        for key, which in kept.items():
            if not key.endswith(_KEY) or len(which) != self.init_r:
                raise AdapterError(
                    f"rank_pattern has {len(which)} of {key!r}; give init_r={self.init_r} values "
                    f"of a module's path and {_KEY}"
                )

    @property
    def one_rank(self) -> int | None:
        return self.init_r if self.rank_pattern is None else None

    def bypass_at(self, path: str) -> AdaLoraBypass:
        which = None if self.rank_pattern is None else self.rank_pattern.get(path + _KEY)
        rank = self.init_r if which is None else sum(which)
        return AdaLoraBypass(rank, self.lora_alpha / (self.init_r + EPSILON))

    def config_fields(
        self, target_modules: Names | str | None, base_model_name: str, notes: Json
    ) -> dict[str, Any]:
        """The fields as peft writes them, which reads no configuration without a schedule."""
        fields = super().config_fields(target_modules, base_model_name, notes)
        if self.total_step is None:  # it was not trained yet: the shortest that peft takes
            fields["total_step"] = self.tinit + self.tfinal + 1
        return fields

    # ---------------------------------------------------------------------------------- training

    def for_job(self, total_steps: int) -> Self:
        """The recipe with the job's own steps for the schedule, where it has none."""
        return self if self.total_step is not None else replace(self, total_step=total_steps)

    @property
    def schedule(self) -> Mapping[str, object]:
        names = (
            "lora_alpha", "beta1", "beta2", "deltaT", "orth_reg_weight", "init_r", "total_step",
            "tfinal", "tinit", "target_r",
        )  # fmt: skip
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}

    def training_beside(self, shards: Shards, total_steps: int) -> TrainingBeside:
        if self.rank_pattern is not None:
            raise FinetuneError(
                "the adapter's ranks are given already (rank_pattern), and AdaLoRA would begin "
                "anew; train a fresh one, or go on from a checkpoint"
            )
        if self.target_r > self.init_r:
            raise FinetuneError(f"target_r={self.target_r} is above init_r={self.init_r}; lower it")
        recipe = self.for_job(total_steps)
        assert recipe.total_step is not None
        if recipe.total_step - recipe.tfinal == 1:
            raise FinetuneError(
                f"tfinal={self.tfinal} and total_step={recipe.total_step} end the allocation of "
                "ranks with its first step, before there are scores; take one step more at least"
            )
        return AdaLoraTraining(recipe, shards)


class AdaLoraTraining(RankAllocator):
    """The allocation of an AdaLoRA adapter's ranks in one job."""

    def __init__(self, recipe: AdaLoraConfig, shards: Shards) -> None:
        assert recipe.total_step is not None
        schedule = Schedule(
            rank=recipe.init_r,
            target_rank=recipe.target_r,
            before=recipe.tinit,
            last=recipe.total_step - recipe.tfinal,
            interval=recipe.deltaT,
            beta1=recipe.beta1,
            beta2=recipe.beta2,
            orthogonality=recipe.orth_reg_weight,
        )
        super().__init__(schedule, shards, _RANK_DIMS, "adalora_E")
        self._recipe = recipe

    def finished(self, adapter: Any) -> Any:
        """The adapter without the triplets that do nothing."""
        weights: Mapping[str, AdaLoraWeights] = adapter.weights
        kept = {path + _KEY: each.kept for path, each in weights.items()}
        if all(bool(which.all()) for which in kept.values()):
            return dataclasses.replace(adapter, recipe=self._recipe)
        pattern = {key: tuple(which.tolist()) for key, which in kept.items()}
        recipe = replace(self._recipe, rank_pattern=pattern)
        pruned = {path: each.pruned() for path, each in weights.items()}
        return dataclasses.replace(adapter, recipe=recipe, weights=pruned)
