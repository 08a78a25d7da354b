"""An AdaLoRA recipe: LoRA with singular values, of which training keeps the important ones.

    y = W x + scale · B (E ⊙ (A x)),   A: [rank, in],  E: [rank, 1],  B: [out, rank]
    scale = alpha / (rank at the start + 1e-5)

Each row of A, with its E and its column of B, is a triplet. All modules begin with the same rank;
training leaves as many triplets of the whole adapter as `target_rank` of each module would be, and
`kept` says which (Zhang et al. 2023). A and B are drawn towards orthogonal rows and columns by a
loss beside the data's.

Modules are targets as in peft 0.21.2 (`AdaLoraModel`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from pcg.errors import AdapterError
from pcg.ir.shapes import Shapes
from pcg.peft.targets import TargetRecipe

# The decoders among TRANSFORMERS_MODELS_TO_ADALORA_TARGET_MODULES_MAPPING in peft 0.21.2.
FAMILY_TARGETS: Mapping[str, tuple[str, ...]] = {
    "bloom": ("query_key_value",),
    "gemma": ("q_proj", "v_proj"),
    "gemma2": ("q_proj", "v_proj"),
    "gemma3_text": ("q_proj", "v_proj"),
    "gpt2": ("c_attn",),
    "gpt_bigcode": ("c_attn",),
    "gpt_neo": ("q_proj", "v_proj"),
    "gpt_neox": ("query_key_value",),
    "gptj": ("q_proj", "v_proj"),
    "llama": ("q_proj", "v_proj"),
    "opt": ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"),
    "qwen2": ("q_proj", "v_proj"),
    "qwen3": ("q_proj", "v_proj"),
}
EPSILON = 1e-5
"""What peft adds to the rank that it divides by."""
_KEY = ".lora_E"


@dataclass(frozen=True, slots=True)
class AdaLoraSite:
    """The bypass of one module."""

    rank: int
    scale: float

    def trained_shapes(self, out: int, in_: int) -> Shapes:
        """Of what is trained at a module [out, in]."""
        return (self.rank, in_), (out, self.rank), (self.rank, 1)

    def __str__(self) -> str:
        return f"AdaLoRA of rank {self.rank} with scale {self.scale:g}"


@dataclass(frozen=True)
class AdaLoraRecipe(TargetRecipe[AdaLoraSite]):
    """The compiler's view of an AdaLoRA configuration; the defaults are peft's.

    Attributes:
        rank: of every module at the start (`init_r`).
        target_rank: of a module on average at the end (`target_r`).
        alpha: numerator of the scale.
        steps_before: steps until the first triplet goes (`tinit`).
        steps_after: steps after the last one has gone (`tfinal`).
        interval: steps from one allocation to the next (`deltaT`).
        beta1: of the moving average of importance.
        beta2: of that of its deviation.
        orthogonality: weight of the loss that draws A and B towards orthogonal ones.
        steps: of the whole schedule (`total_step`); None is finetuning's own number.
        kept: of each module, which of its first triplets are left (`rank_pattern`), by its path
            and `.lora_E`; None where all are.
        init: True, A and B are normal and E zero, which changes nothing; False, all are normal.
    """

    method: ClassVar[str] = "AdaLoRA"
    peft_type: ClassVar[str] = "ADALORA"
    biases: ClassVar[tuple[str, ...]] = ("none", "all", "lora_only")
    family_targets: ClassVar[Mapping[str, tuple[str, ...]]] = FAMILY_TARGETS

    rank: int = 12
    target_rank: int = 8
    alpha: float = 8
    steps_before: int = 0
    steps_after: int = 0
    interval: int = 1
    beta1: float = 0.85
    beta2: float = 0.85
    orthogonality: float = 0.5
    steps: int | None = None
    kept: Mapping[str, tuple[bool, ...]] | None = field(default=None, hash=False)
    init: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_numbers(self)
        if not isinstance(self.init, bool):
            raise AdapterError(f"init_lora_weights={self.init!r}; use true or false")
        if self.steps is not None and self.steps_before >= self.steps - self.steps_after:
            raise AdapterError(
                f"tinit={self.steps_before}, tfinal={self.steps_after} and total_step={self.steps} "
                "leave no step to allocate ranks in; lower the first two, or raise total_step"
            )
        if self.kept is not None:
            kept = {key: tuple(which) for key, which in self.kept.items()}
            object.__setattr__(self, "kept", kept)
            for key, which in kept.items():
                if not key.endswith(_KEY) or len(which) != self.rank:
                    raise AdapterError(
                        f"rank_pattern has {len(which)} of {key!r}; give init_r={self.rank} values "
                        f"of a module's path and {_KEY}"
                    )

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank + EPSILON)

    def site_of_target(self, path: str) -> AdaLoraSite:
        which = None if self.kept is None else self.kept.get(path + _KEY)
        return AdaLoraSite(self.rank if which is None else sum(which), self.scale)

    @property
    def schedule(self) -> dict[str, object]:
        """What decides the ranks and is not a module's, by peft's names; without what is open."""
        values = {name: getattr(self, own) for own, name in _PEFT.items()}
        return {name: value for name, value in values.items() if value is not None}

    @staticmethod
    def key_of(path: str) -> str:
        """What `kept` has a module by."""
        return path + _KEY


def _check_numbers(recipe: AdaLoraRecipe) -> None:
    least = {"rank": 1, "target_rank": 1, "steps_before": 0, "steps_after": 0, "interval": 1}
    for name, at_least in {**least, **({} if recipe.steps is None else {"steps": 1})}.items():
        value = getattr(recipe, name)
        if type(value) is not int or value < at_least:
            raise AdapterError(f"{_PEFT[name]}={value!r}; use an int of at least {at_least}")
    for name in ("alpha", "beta1", "beta2", "orthogonality"):
        value = getattr(recipe, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value):
            raise AdapterError(f"{_PEFT[name]}={value!r}; use a finite number")
    if recipe.alpha <= 0:
        raise AdapterError(f"lora_alpha={recipe.alpha:g}; use a number above 0")
    if recipe.orthogonality < 0:
        raise AdapterError(f"orth_reg_weight={recipe.orthogonality:g}; use a number of at least 0")
    for name in ("beta1", "beta2"):
        if not 0 < getattr(recipe, name) < 1:
            raise AdapterError(f"{name}={getattr(recipe, name):g}; use a number between 0 and 1")


_PEFT = {
    "alpha": "lora_alpha",
    "beta1": "beta1",
    "beta2": "beta2",
    "interval": "deltaT",
    "orthogonality": "orth_reg_weight",
    "rank": "init_r",
    "steps": "total_step",
    "steps_after": "tfinal",
    "steps_before": "tinit",
    "target_rank": "target_r",
}
