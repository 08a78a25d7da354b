"""A LoRA recipe: which linear modules get a bypass, and each one's rank and scale.

    y = W x + scale · B (A x),   A: [rank, in],  B: [out, rank]
    scale = alpha / rank,  or alpha / √rank with rsLoRA

With DoRA, each output of W + scale · B A has a length of its own, the magnitude m: [out],

    y = m / ||W + scale · B A|| ⊙ (W + scale · B A) x + b

and the length that it replaces is taken for a constant in training, as peft does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from pcg.errors import AdapterError
from pcg.ir.module_paths import first_match
from pcg.ir.shapes import Shapes
from pcg.peft.targets import ALL_LINEAR, TargetRecipe

# model_type -> the modules adapted where a recipe names none; the decoders among
# TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING in peft 0.21.2 (peft/utils/constants.py).
FAMILY_TARGETS: Mapping[str, tuple[str, ...]] = {
    "RefinedWeb": ("query_key_value",),
    "RefinedWebModel": ("query_key_value",),
    "bloom": ("query_key_value",),
    "codegen": ("qkv_proj",),
    "falcon": ("query_key_value",),
    "gemma": ("q_proj", "v_proj"),
    "gemma2": ("q_proj", "v_proj"),
    "gemma3_text": ("q_proj", "v_proj"),
    "gpt2": ("c_attn",),
    "gpt_bigcode": ("c_attn",),
    "gpt_neo": ("q_proj", "v_proj"),
    "gpt_neox": ("query_key_value",),
    "gptj": ("q_proj", "v_proj"),
    "llama": ("q_proj", "v_proj"),
    "mistral": ("q_proj", "v_proj"),
    "mixtral": ("q_proj", "v_proj"),
    "mpt": ("Wqkv",),
    "opt": ("q_proj", "v_proj"),
    "phi": ("q_proj", "v_proj", "fc1", "fc2"),
    "qwen2": ("q_proj", "v_proj"),
    "qwen3": ("q_proj", "v_proj"),
    "stablelm": ("q_proj", "v_proj"),
}


@dataclass(frozen=True, slots=True)
class Site:
    """The bypass of one module: y += scale · B (A x)."""

    rank: int
    scale: float
    use_dora: bool = False
    has_bias: bool = False

    def trained_shapes(self, out: int, in_: int) -> Shapes:
        """Of what is trained at a module [out, in]."""
        vectors = ((out,),) * (self.use_dora + self.has_bias)
        return (self.rank, in_), (out, self.rank), *vectors

    def __str__(self) -> str:
        extra = " and DoRA" * self.use_dora + " and lora_bias" * self.has_bias
        return f"rank {self.rank} with scale {self.scale:g}{extra}"


@dataclass(frozen=True)
class LoraRecipe(TargetRecipe[Site]):
    """The compiler's view of a LoRA configuration; the defaults are peft's.

    Attributes:
        rank: r of a module that no key of `rank_pattern` matches.
        alpha: numerator of the scale of a module that no key of `alpha_pattern` matches.
        rank_pattern: regexes for the end of a path -> rank; the first that matches counts.
        alpha_pattern: the same for alpha.
        use_rslora: scale is alpha / √rank.
        use_dora: magnitudes are trained, too (DoRA).
        lora_bias: B has a bias, which is scaled as B is.
        init: True, A uniform as in nn.Linear and B zero; "gaussian", A normal and B zero; False,
            both uniform; other names of peft's stay names.
    Raises:
        AdapterError: a value is out of its range, or a regex is none.
    """

    method: ClassVar[str] = "LoRA"
    peft_type: ClassVar[str] = "LORA"
    biases: ClassVar[tuple[str, ...]] = ("none", "all", "lora_only")
    family_targets: ClassVar[Mapping[str, tuple[str, ...]]] = FAMILY_TARGETS
    patterns: ClassVar[tuple[str, ...]] = ("rank_pattern", "alpha_pattern")

    rank: int = 8
    alpha: float = 8
    rank_pattern: Mapping[str, int] = field(default_factory=dict, hash=False)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict, hash=False)
    use_rslora: bool = False
    use_dora: bool = False
    lora_bias: bool = False
    init: bool | str = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_ranks(self)
        _check_choices(self)

    @classmethod
    def default(cls) -> LoraRecipe:
        """What `peft="lora"` means: rank 16, alpha 32, all linear modules."""
        return cls(rank=16, alpha=32, target_modules=ALL_LINEAR)

    def site_of_target(self, path: str) -> Site:
        """Rank and scale at `path`, taking for granted that it is a target."""
        rank = first_match(self.rank_pattern, path, self.rank)
        alpha = first_match(self.alpha_pattern, path, self.alpha)
        scale = alpha / (math.sqrt(rank) if self.use_rslora else rank)
        return Site(rank, scale, self.use_dora, self.lora_bias)


def _check_ranks(recipe: LoraRecipe) -> None:
    ranks = {"rank": recipe.rank}
    ranks |= {f"rank_pattern[{key!r}]": rank for key, rank in recipe.rank_pattern.items()}
    for name, rank in ranks.items():
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
            raise AdapterError(f"{name}={rank!r}; a rank is an int of at least 1")
    alphas = {"alpha": recipe.alpha}
    alphas |= {f"alpha_pattern[{key!r}]": alpha for key, alpha in recipe.alpha_pattern.items()}
    for name, alpha in alphas.items():
        is_number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
        if not is_number or not math.isfinite(alpha):
            raise AdapterError(f"{name}={alpha!r}; use a finite number")


def _check_choices(recipe: LoraRecipe) -> None:
    for name in ("use_rslora", "use_dora", "lora_bias"):
        if not isinstance(getattr(recipe, name), bool):
            raise AdapterError(f"{name}={getattr(recipe, name)!r}; use True or False")
    if not isinstance(recipe.init, bool | str):
        raise AdapterError(f'init={recipe.init!r}; use True, False or "gaussian"')
    if recipe.lora_bias and not isinstance(recipe.init, bool):
        raise AdapterError(f"lora_bias goes with init True or False only, not {recipe.init!r}")
    if recipe.lora_bias and recipe.use_dora:
        raise AdapterError(
            "lora_bias=True does not go with use_dora=True; set one of them to False"
        )
