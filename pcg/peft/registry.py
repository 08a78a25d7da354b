"""The recipes of all PEFT methods, by peft's name of the method."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeAlias

from pcg.errors import AdapterError
from pcg.peft.adalora import AdaLoraRecipe
from pcg.peft.bitfit import BitfitRecipe
from pcg.peft.bottleneck import BottleneckRecipe
from pcg.peft.ia3 import Ia3Recipe
from pcg.peft.lora import LoraRecipe
from pcg.peft.prefix import PrefixRecipe
from pcg.peft.prompt import PromptTuningRecipe, PTuningRecipe
from pcg.peft.targets import ALL_LINEAR, TargetRecipe
from pcg.peft.vera import VeraRecipe

Recipe: TypeAlias = TargetRecipe[Any]

_METHODS: tuple[type[Recipe], ...] = (
    AdaLoraRecipe,
    BitfitRecipe,
    BottleneckRecipe,
    Ia3Recipe,
    LoraRecipe,
    PTuningRecipe,
    PrefixRecipe,
    PromptTuningRecipe,
    VeraRecipe,
)
RECIPES: Mapping[str, type[Recipe]] = {recipe.peft_type: recipe for recipe in _METHODS}

SHORTHANDS: Mapping[str, Recipe] = {
    "lora": LoraRecipe.default(),
    "dora": dataclasses.replace(LoraRecipe.default(), use_dora=True),
    "ia3": Ia3Recipe(),
    "adalora": AdaLoraRecipe(target_modules=ALL_LINEAR),
    "vera": VeraRecipe(target_modules=ALL_LINEAR),
    "houlsby": BottleneckRecipe(variant="houlsby"),
    "pfeiffer": BottleneckRecipe(variant="pfeiffer"),
    "parallel": BottleneckRecipe(variant="parallel"),
    "bitfit": BitfitRecipe(),
    "prompt": PromptTuningRecipe(tokens=20),
    "p-tuning": PTuningRecipe(tokens=20),
    "prefix": PrefixRecipe(tokens=20),
}
"""Recipes that a word stands for, with the usual sizes."""


def is_shorthand(value: object) -> bool:
    """Whether a word stands for a recipe; any other string is a path."""
    return isinstance(value, str) and value.lower() in SHORTHANDS


def recipe_fields(recipe: Recipe) -> dict[str, Any]:
    """A recipe as plain data."""
    return {"peft_type": recipe.peft_type, **dataclasses.asdict(recipe)}


def recipe_of_fields(fields: Mapping[str, Any]) -> Recipe:
    """The recipe of `recipe_fields`, also of JSON's, which made lists of tuples.

    Raises:
        AdapterError: a method or a field that no recipe has, or a value out of its range.
    """
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()
    }
    method = str(values.pop("peft_type", ""))
    if method not in RECIPES:
        raise AdapterError(f"peft_type={method!r}; use one of {', '.join(RECIPES)}")
    known = {field.name for field in dataclasses.fields(RECIPES[method])}
    unknown = sorted(values.keys() - known)
    if unknown:
        raise AdapterError(
            f"{method} has no field {unknown[0]!r}; it has {', '.join(sorted(known))}"
        )
    return RECIPES[method](**values)
