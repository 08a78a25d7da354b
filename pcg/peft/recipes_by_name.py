"""What a user gives as `peft`: nothing, one recipe, or several by name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from pcg.peft.adapters import read_adapter, recipe_from
from pcg.peft.registry import Recipe, is_shorthand


def recipes_of(peft: object) -> dict[str, Recipe]:
    """The recipes that `peft` names; one without a name is called `default`."""
    if peft is None:
        return {}
    if isinstance(peft, Mapping) and not is_recipe(peft):
        return {str(name): _recipe(value) for name, value in peft.items()}
    return {"default": _recipe(peft)}


def is_recipe(peft: Mapping[Any, Any]) -> bool:
    """True if a mapping is one recipe's fields, and not recipes by name."""
    return "peft_type" in peft


def _recipe(value: object) -> Recipe:
    if isinstance(value, str | os.PathLike) and not is_shorthand(value):
        return read_adapter(value, "adapter").recipe
    return recipe_from(value)
