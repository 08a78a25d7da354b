"""An (IA)³ recipe: which linear modules are scaled, and whether at their input or their output.

    y = l ⊙ (W x + b),  l: [out];   at a feedforward module  y = W (l ⊙ x) + b,  l: [in]

Modules are targets and feedforward modules as in peft 0.21.2 (`IA3Model`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from pcg.errors import AdapterError
from pcg.ir.module_paths import did_you_mean, name_list
from pcg.ir.shapes import Shapes
from pcg.peft.targets import TargetRecipe

# The decoders among TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING and
# TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING in peft 0.21.2 (peft/utils/constants.py).
FAMILY_TARGETS: Mapping[str, tuple[str, ...]] = {
    "RefinedWeb": ("query_key_value", "dense_4h_to_h"),
    "RefinedWebModel": ("query_key_value", "dense_4h_to_h"),
    "bloom": ("query_key_value", "mlp.dense_4h_to_h"),
    "falcon": ("query_key_value", "dense_4h_to_h"),
    "gemma": ("q_proj", "v_proj", "down_proj"),
    "gemma2": ("q_proj", "v_proj", "down_proj"),
    "gemma3_text": ("q_proj", "v_proj", "down_proj"),
    "gpt2": ("c_attn", "mlp.c_proj"),
    "gpt_bigcode": ("c_attn", "mlp.c_proj"),
    "gpt_neo": ("q_proj", "v_proj", "c_proj"),
    "gpt_neox": ("query_key_value", "dense_4h_to_h"),
    "gptj": ("q_proj", "v_proj", "fc_out"),
    "llama": ("k_proj", "v_proj", "down_proj"),
    "mistral": ("k_proj", "v_proj", "down_proj"),
    "mixtral": ("k_proj", "v_proj", "w2"),
    "opt": ("q_proj", "k_proj", "fc2"),
    "phi": ("q_proj", "v_proj", "fc2"),
    "qwen2": ("q_proj", "v_proj", "down_proj"),
    "qwen3": ("q_proj", "v_proj", "down_proj"),
}
FAMILY_FEEDFORWARD: Mapping[str, tuple[str, ...]] = {
    model_type: targets[-1:] for model_type, targets in FAMILY_TARGETS.items()
}


@dataclass(frozen=True, slots=True)
class Ia3Site:
    """The bypass of one module: its input or its output is scaled."""

    is_feedforward: bool

    def trained_shapes(self, out: int, in_: int) -> Shapes:
        """Of what is trained at a module [out, in]."""
        return ((in_ if self.is_feedforward else out,),)

    def __str__(self) -> str:
        return f"(IA)³ on the {'input' if self.is_feedforward else 'output'}"


@dataclass(frozen=True)
class Ia3Recipe(TargetRecipe[Ia3Site]):
    """The compiler's view of an (IA)³ configuration; the defaults are peft's.

    Attributes:
        feedforward_modules: names or one regex for the whole path; targets that they match are
            scaled at their input. A name matches any path that ends in it, as in peft, even behind
            no dot. None is what is usual for the family.
        init: True, vectors of ones, which change nothing; False, normal ones.
    """

    method: ClassVar[str] = "(IA)³"
    peft_type: ClassVar[str] = "IA3"
    family_targets: ClassVar[Mapping[str, tuple[str, ...]]] = FAMILY_TARGETS

    feedforward_modules: tuple[str, ...] | str | None = None
    init: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        names = self.feedforward_modules
        if isinstance(names, str):
            try:
                re.compile(names)
            except re.error as error:
                raise AdapterError(
                    f"feedforward_modules has {names!r}, which is not a regex: {error}"
                ) from error
        elif names is not None and not (
            isinstance(names, tuple) and all(isinstance(name, str) and name for name in names)
        ):
            raise AdapterError(
                f"feedforward_modules={names!r}; use a tuple of names that are not empty"
            )
        if not isinstance(self.init, bool):
            raise AdapterError(f"init={self.init!r}; use True or False")

    def site_of_target(self, path: str) -> Ia3Site:
        names = self.feedforward_modules
        if names is None:
            raise AdapterError("feedforward_modules is not given; name them, or () for none")
        if isinstance(names, str):
            return Ia3Site(re.fullmatch(names, path) is not None)
        return Ia3Site(path.endswith(names))

    def sites(
        self,
        paths: Sequence[str],
        output_layer: str | None = None,
        model_type: str | None = None,
        others: Collection[str] = (),
    ) -> dict[str, Ia3Site]:
        found = super().sites(paths, output_layer, model_type, others)
        names = self.feedforward_modules
        for name in names if isinstance(names, tuple) else ():
            if not any(path.endswith(name) for path in found):
                raise AdapterError(
                    f"feedforward_modules has {name!r}, which none of the {len(found)} adapted "
                    f"modules is named{did_you_mean(name, found)}; {name_list(found)}"
                )
        return found

    def for_family(self, model_type: str | None) -> Self:
        recipe = super().for_family(model_type)
        if recipe.feedforward_modules is not None:
            return recipe
        usual = self._usual("feedforward_modules", FAMILY_FEEDFORWARD, model_type)
        if isinstance(recipe.target_modules, tuple):
            usual = tuple(name for name in usual if name in recipe.target_modules)
        return dataclasses.replace(recipe, feedforward_modules=usual)
