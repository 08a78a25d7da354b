"""AdaLoRA: LoRA with singular values; training keeps the important values.

    y = W x + scale · B (E ⊙ (A x)),   A: [rank, in],  E: [rank, 1],  B: [out, rank]
    scale = alpha / (rank at the start + 1e-5)

Each row of A, with its E and its column of B, is a triplet. All modules begin with the same rank;
training leaves as many triplets of the whole adapter as `target_r` of each module would be, and
`rank_pattern` lists them.

    base_model.model.<module>.lora_A      [rank, in]
    base_model.model.<module>.lora_B      [out, rank]
    base_model.model.<module>.lora_E      [rank, 1]

A file holds the triplets that `rank_pattern` in its configuration keeps.

Training, outside the program. With P = A or Bᵀ [r, m] of each of n matrices, G = P Pᵀ and ||·|| the
Frobenius norm, a loss in addition to the data's makes the rows of A and columns of B orthogonal:

    R = weight / n · Σ ||G - I||                                               (§3.1, eq. 4)
    ∂R/∂P = weight / n · 2 (G - I) P / ||G - I||                               0 where G = I

If ranks of the group hold shards P_i of m's entries, G is the sum of P_i P_iᵀ over all ranks, in an
exchange of r² numbers per matrix; each rank then computes the gradient of its P_i. Split rows are
gathered before.

After step t of the optimizer, with each parameter w and its clipped gradient g,

    I = |w g|;   Ī = β₁ Ī + (1 - β₁) I;   U = β₂ U + (1 - β₂) |I - Ī|          (§3.2, eq. 8-10)
    score of a triplet = Ī U of its E + the means of Ī U of its row of A and column of B

and if an allocation is due at t, E of the triplets with the lowest scores, beyond the budget, is 0:

    budget(t) = target + (start - target) (1 - (t - before) / (last - before))³         (§3.3)

Until step `last`, the E of a zeroed triplet may grow again; afterwards the zeroed set is fixed.
Further training of a pruned adapter keeps its ranks, and adds R.
Each rank of the group has Ī and U of its shards. A mean is a sum over all shards; ranks exchange
only scores, so all have the same scores and zero the same triplets.

torch is imported in the functions that compute, so that recipes are read without it.

Source: "Adaptive Budget Allocation for Parameter-Efficient Fine-Tuning" (Zhang et al. 2023);
`AdaLoraConfig`, `SVDLinear`, `RankAllocator`, `AdaLoraModel.forward` and `update_and_allocate` of
peft 0.21.2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pcg.errors import AdapterError, FinetuneError
from pcg.ir.shapes import Shapes
from pcg.peft.lora import LORA_FIELDS, MadeLoraBypass
from pcg.peft.method import Place, Shape, Shards, TrainingBeside, low_rank
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


_IMPORTANCE, _UNCERTAINTY, _MASK = "importance/", "uncertainty/", "mask/"


@dataclass(frozen=True)
class Schedule:
    """The times of allocations, and their parameters.

    Attributes:
        rank: triplets of each module at the start.
        target_rank: triplets of each module on average at the end.
        before: steps until the first triplet is dropped.
        last: the step of the last dropped triplet.
        interval: steps between allocations.
        beta1: decay of Ī.
        beta2: decay of U.
        orthogonality: weight of R.
        matrices: n of R, which counts modules without a triplet, too; 0 for all matrices.
    """

    rank: int
    target_rank: int
    before: int
    last: int
    interval: int
    beta1: float
    beta2: float
    orthogonality: float
    matrices: int = 0


class RankAllocator:
    """The allocation of ranks in a job."""

    def __init__(
        self, schedule: Schedule, shards: Shards, rank_dims: Mapping[str, int], values: str
    ) -> None:
        """Start with all triplets.

        Args:
            shards: this rank's shards of the adapter.
            rank_dims: the triplets' dim in each kind of parameter.
            values: the kind of E.
        """
        self._schedule = schedule
        self._shards = shards
        parts = {name: shards.path_of(name).rpartition(".") for name in shards.tensors}
        self._module_of = {n: path for n, (path, _, kind) in parts.items() if kind in rank_dims}
        self._rank_dims = {n: rank_dims[parts[n][2]] for n in self._module_of}
        self._values = [n for n in self._module_of if parts[n][2] == values]
        self._count = len({*self._module_of.values()})
        self._importance: dict[str, Tensor] = {}
        self._uncertainty: dict[str, Tensor] = {}
        self._masks: dict[str, Tensor] = {}

    # ----------------------------------------------------------------------- orthogonality

    def regularize(self) -> float:
        """Add R's gradient to each parameter's summed gradient; return R."""
        import torch

        shards = self._shards
        dims = {n: dim for n, dim in self._rank_dims.items() if n not in self._values}
        parts = {name: shards.tensors[name].detach() for name in dims}
        of_rows = {name: parts[name] for name in dims if shards.sharded_dim(name) == dims[name]}
        for name, shards_of_ranks in shards.gathered(of_rows).items():
            parts[name] = torch.cat(shards_of_ranks, dims[name])
        rows = {name: part if dims[name] == 0 else part.t() for name, part in parts.items()}

        grams: dict[str, Tensor] = {}
        for name, p in rows.items():
            counts = shards.counts(name, gathered=dims[name])
            gram = p @ p.t() if counts else p.new_zeros(len(p), len(p))
            path = shards.path_of(name)
            grams[path] = grams[path] + gram if path in grams else gram

        total = 0.0
        each = self._schedule.orthogonality / (self._schedule.matrices or len(grams))
        slopes = {}
        for path, gram in zip(grams, shards.summed([*grams.values()]), strict=True):
            difference = gram - torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
            distance = torch.linalg.matrix_norm(difference)
            total += each * float(distance)
            smallest = torch.finfo(gram.dtype).tiny
            slopes[path] = 2 * each * difference / distance.clamp_min(smallest)
        for name, p in rows.items():
            start, stop = shards.ranges(name)[dims[name]]
            gradient = slopes[shards.path_of(name)][start:stop] @ p
            gradient = gradient if dims[name] == 0 else gradient.t()
            tensor = shards.tensors[name]
            tensor.grad = gradient if tensor.grad is None else tensor.grad.add_(gradient)
        return total

    # -------------------------------------------------------------------------- allocation

    def after_step(self, step: int) -> None:
        """Update the scores and zero the triplets beyond the budget.

        Args:
            step: the optimizer's last step, from 1; its gradients are still available.
        """
        schedule, last = self._schedule, self._schedule.last
        if step > last:
            self._mask()
            return
        if step < last:
            self._update_scores()
        steps = step - schedule.before
        if step == last or (steps > 0 and step % schedule.interval == 0):
            start, target = schedule.rank * self._count, schedule.target_rank * self._count
            progress = steps / (last - schedule.before)
            self._choose(int((start - target) * (1 - progress) ** 3 + target))
            self._mask()
        if step == last:
            self._importance, self._uncertainty = {}, {}

    def _update_scores(self) -> None:
        beta1, beta2 = self._schedule.beta1, self._schedule.beta2
        for name in self._module_of:
            parameter = self._shards.tensors[name]
            assert parameter.grad is not None
            now = (parameter.detach() * parameter.grad).abs()
            zeros = now.new_zeros(now.shape)
            importance = beta1 * self._importance.get(name, zeros) + (1 - beta1) * now
            before = self._uncertainty.get(name, zeros)
            self._importance[name] = importance
            self._uncertainty[name] = beta2 * before + (1 - beta2) * (now - importance).abs()

    def _choose(self, budget: int) -> None:
        import torch

        scores = self._scores()
        beyond = self._schedule.rank * self._count - budget
        if beyond >= 1:
            threshold = torch.cat([*scores.values()]).kthvalue(beyond).values
            self._masks = {module: of_module <= threshold for module, of_module in scores.items()}

    def _scores(self) -> dict[str, Tensor]:
        """Return the scores of each module's triplets, [rank]."""
        shards = self._shards
        by_module: dict[str, Tensor] = {}
        for name, module in self._module_of.items():
            each = self._importance[name] * self._uncertainty[name]
            along, across = self._rank_dims[name], 1 - self._rank_dims[name]
            scores = by_module.setdefault(module, each.new_zeros(self._schedule.rank))
            if shards.counts(name):
                start, stop = shards.ranges(name)[along]
                whole = shards.whole_shape(shards.path_of(name))
                scores[start:stop] += each.sum(across) / whole[across]
        return dict(zip(by_module, shards.summed([*by_module.values()]), strict=True))

    def _mask(self) -> None:
        for name in self._values if self._masks else ():
            start, stop = self._shards.ranges(name)[self._rank_dims[name]]
            values = self._shards.tensors[name].detach()
            values[self._masks[self._module_of[name]][start:stop]] = 0.0

    # ------------------------------------------------------------------------------- state

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The state of whole tensors, for a checkpoint; all ranks call this."""
        parts = ((_IMPORTANCE, self._importance), (_UNCERTAINTY, self._uncertainty))
        named = {
            f"{head}{path}": tensor
            for head, part in parts
            for path, tensor in self._shards.joined(part).items()
        }
        return {**named, **{f"{_MASK}{module}": mask for module, mask in self._masks.items()}}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the state of a checkpoint."""
        device = next(iter(self._shards.tensors.values())).device
        by_kind: dict[str, dict[str, Tensor]] = {_IMPORTANCE: {}, _UNCERTAINTY: {}, _MASK: {}}
        for key, tensor in tensors.items():
            head, _, name = key.partition("/")
            by_kind[f"{head}/"][name] = tensor.to(device)
        self._importance = self._shards.cut(by_kind[_IMPORTANCE])
        self._uncertainty = self._shards.cut(by_kind[_UNCERTAINTY])
        self._masks = by_kind[_MASK]


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
"""Number that peft adds to the rank in the scale's denominator."""
_KEY = ".lora_E"
_RANK_DIMS = {"adalora_A": 0, "adalora_B": 1, "adalora_E": 0}


@dataclass(frozen=True)
class AdaLoraBypass(MadeLoraBypass):
    """AdaLoRA at a module: LoRA with singular values in A; serving has them in A.

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
    """AdaLoRA's weights of a module: y += scale · B (E ⊙ (A x)), E: [rank, 1]."""

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
        return {
            "lora_A": lambda around: self.a * self.e,
            "lora_B": lambda around: self.b.t() * self.scale,
        }

    @property
    def kept(self) -> Tensor:
        """The nonzero triplets: [rank], bool."""
        return self.e[:, 0] != 0

    def pruned(self) -> Self:
        kept = self.kept
        return replace(self, a=self.a[kept], b=self.b[:, kept], e=self.e[kept])


@dataclass(frozen=True, kw_only=True)
class AdaLoraConfig(LayeredRecipe):
    """An AdaLoRA configuration, with peft's fields and defaults.

    Attributes:
        bias: trained biases of the base: "none", "all", or "lora_only", those of the adapted
            modules.
        lora_dropout: probability that an element of a module's input is dropped in training.
        init_r: the rank of every module at the start.
        target_r: the rank of a module on average at the end.
        lora_alpha: numerator of the scale.
        tinit: steps until the first triplet is dropped.
        tfinal: steps after the last triplet is dropped.
        deltaT: steps between allocations.
        beta1: decay of the moving average of importance.
        beta2: decay of the moving average of importance's deviation.
        orth_reg_weight: weight of the loss that makes A and B orthogonal.
        total_step: steps of the whole schedule; None is finetuning's own number.
        rank_pattern: for each module, by its path and `.lora_E`, which of its first triplets
            remain; None keeps all.
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
        "r": note(8),  # init_r is the rank; peft ignores r
        "target_parameters": refused("AdaLoRA on parameters, such as experts"),
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
        """Return the fields as peft writes them; peft reads no configuration without a schedule."""
        fields = super().config_fields(target_modules, base_model_name, notes)
        if self.total_step is None:  # untrained: the shortest schedule that peft accepts
            fields["total_step"] = self.tinit + self.tfinal + 1
        return fields

    # ---------------------------------------------------------------------------------- training

    def for_job(self, total_steps: int) -> Self:
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
            return AdaLoraTraining(self, shards)
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
    """The allocation of an AdaLoRA adapter's ranks in a job; a pruned adapter keeps its ranks."""

    def __init__(self, recipe: AdaLoraConfig, shards: Shards) -> None:
        is_pruned = recipe.rank_pattern is not None
        schedule = Schedule(
            rank=recipe.init_r,
            target_rank=recipe.target_r,
            before=recipe.tinit,
            last=0 if is_pruned else (recipe.total_step or 0) - recipe.tfinal,
            interval=recipe.deltaT,
            beta1=recipe.beta1,
            beta2=recipe.beta2,
            orthogonality=recipe.orth_reg_weight,
            matrices=2 * len(recipe.rank_pattern or ()),
        )
        super().__init__(schedule, shards, _RANK_DIMS, "adalora_E")
        self._recipe = recipe

    def finished(self, adapter: Any) -> Any:
        """Return the adapter without zero triplets."""
        weights: Mapping[str, AdaLoraWeights] = adapter.weights
        kept = {path + _KEY: each.kept for path, each in weights.items()}
        is_pruned = self._recipe.rank_pattern is not None
        if is_pruned or all(bool(which.all()) for which in kept.values()):
            return dataclasses.replace(adapter, recipe=self._recipe)
        pattern = {key: tuple(which.tolist()) for key, which in kept.items()}
        recipe = replace(self._recipe, rank_pattern=pattern)
        pruned = {path: each.pruned() for path, each in weights.items()}
        return dataclasses.replace(adapter, recipe=recipe, weights=pruned)
