"""Recipes by the name of their method, and from words, configurations and mappings."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any, TypeGuard

from pcg.errors import AdapterError, PcgError, UnsupportedError
from pcg.peft import METHODS
from pcg.peft.lora import LoraConfig
from pcg.peft.recipe import HEADS_OF_LABELS, TASKS, Json, Recipe, to_json
from pcg.peft.weights import SUMMAND, ParameterKind

RECIPES: dict[str, type[Recipe]] = {}
"""The recipes' classes, by peft's name of the method."""
SHORTHANDS: dict[str, Recipe] = {}
"""Recipes with the usual sizes, by their word."""
_KINDS: dict[str, ParameterKind] = {}
# Fields without a recipe's equivalent, which every recipe of a manifest once had.
_ONCE_FIELDS = (
    "bias", "dropout", "exclude_modules", "layers_pattern", "layers_to_transform", "target_modules",
)  # fmt: skip


def register(recipe: type[Recipe]) -> type[Recipe]:
    """Make a method known, by its name in files and by its words; also a decorator of the recipe.

    Raises:
        AdapterError: another method has the name, a word, or a parameter of another kind.
    """
    kinds = recipe.weights.kinds
    taken = [recipe.peft_type] if recipe.peft_type in RECIPES else []
    taken += [word for word in recipe.shorthands if word in SHORTHANDS]
    taken += [name for name, kind in kinds.items() if _KINDS.get(name, kind) != kind]
    if taken:
        raise AdapterError(f"{recipe.__name__}: another method has {taken[0]!r}; rename it")
    RECIPES[recipe.peft_type] = recipe
    SHORTHANDS.update((word, recipe(**fields)) for word, fields in recipe.shorthands.items())
    _KINDS.update(kinds)
    return recipe


for _name, _file in METHODS.items():
    register(getattr(import_module(f"pcg.peft.{_file}"), _name))


def parameter_kind(source: str) -> ParameterKind:
    """Return the kind of an adapter's parameter, by its source; a bias of the base is a summand."""
    return _KINDS.get(source.rpartition(".")[2], SUMMAND)


def is_shorthand(value: object) -> bool:
    """Return whether a word means a recipe; any other string is a path."""
    return isinstance(value, str) and value.lower() in SHORTHANDS


def is_saved(value: object) -> TypeGuard[str | os.PathLike[str]]:
    """Return whether a value of `peft` is the path or the hub id of a saved adapter."""
    return isinstance(value, str | os.PathLike) and not is_shorthand(value)


def recipe_from(config: object, *, saved: bool = False) -> Recipe:
    """Return the recipe of a configuration.

    Args:
        config: a word of `SHORTHANDS`, a recipe, a configuration of peft's, or a mapping as in
            adapter_config.json.
        saved: True if it belongs to saved weights, for which the initialisation matters only if it
            changed the base.
    Raises:
        UnsupportedError: another PEFT method, or a feature that pcg lacks, by name.
        AdapterError: not a configuration, or a value out of its range.
    """
    if isinstance(config, Recipe):
        return config
    if isinstance(config, str):
        return _from_shorthand(config)
    fields = _fields(config)
    return _method_of(fields).from_config(fields, saved=saved)


def _from_shorthand(config: str) -> Recipe:
    if is_shorthand(config):
        return SHORTHANDS[config.lower()]
    error: type[PcgError] = AdapterError if "/" in config or "." in config else UnsupportedError
    raise error(
        f"peft={config!r}: the shorthands are {', '.join(SHORTHANDS)}; give one, a configuration "
        "of peft's, or {name: directory of a saved adapter}"
    )


def _fields(config: object) -> dict[str, Any]:
    if isinstance(config, Mapping):
        return {str(name): value for name, value in config.items()}
    to_dict = getattr(config, "to_dict", None)
    if not hasattr(config, "peft_type") or not callable(to_dict):
        raise AdapterError(
            f"{type(config).__name__} is no PEFT configuration; give one of peft's, such as "
            'LoraConfig, an object as in adapter_config.json, or "lora"'
        )
    if getattr(config, "_custom_modules", None):
        raise UnsupportedError("the LoraConfig registers custom modules, which pcg does not do")
    return dict(to_dict())


def learning_labels(recipe: Recipe) -> Recipe:
    """Return a recipe that trains the head of a sequence classifier whole, as peft's.

    Raises:
        UnsupportedError: the method trains no module whole.
    """
    if not isinstance(recipe, LoraConfig):
        raise UnsupportedError(
            f"{recipe.method} on a sequence classifier, whose head pcg trains with LoRA alone; use "
            "LoRA"
        )
    saved = dict.fromkeys((*(recipe.modules_to_save or ()), *HEADS_OF_LABELS))
    return replace(recipe, modules_to_save=tuple(saved))


def _method_of(fields: Json) -> type[Recipe]:
    if "peft_type" not in fields:
        raise AdapterError(
            f'no "peft_type" among {", ".join(sorted(fields)) or "no fields"}; for LoRA add '
            '"peft_type": "LORA"'
        )
    method = fields["peft_type"]
    method = str(getattr(method, "value", method))
    if method not in RECIPES:
        raise UnsupportedError(
            f"peft_type={method}: pcg does {', '.join(sorted(RECIPES))}; use one of them"
        )
    task = fields.get("task_type")
    task = getattr(task, "value", task)
    if task not in (None, "", *TASKS):
        raise UnsupportedError(f"task_type={task}: pcg does {' and '.join(TASKS)}")
    return RECIPES[method]


# ------------------------------------------------------------------------ in a program's manifest


def recipe_fields(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe as plain data, for a program's manifest."""
    names = _saved_names(type(recipe))
    fields = {saved: to_json(getattr(recipe, name)) for saved, name in names.items()}
    return {"peft_type": recipe.peft_type, **fields}


def recipe_of_fields(fields: Mapping[str, Any]) -> Recipe:
    """Return the recipe of `recipe_fields`.

    Raises:
        AdapterError: an unknown method or field, or a value out of its range.
    """
    peft_type = str(fields.get("peft_type", ""))
    if peft_type not in RECIPES:
        raise AdapterError(f"peft_type={peft_type!r}; use one of {', '.join(sorted(RECIPES))}")
    names = _saved_names(RECIPES[peft_type])
    recipe = RECIPES[peft_type](**{names[s]: fields[s] for s in fields.keys() & names.keys()})
    for name in sorted(fields.keys() - names.keys() - {"peft_type"}):
        if name not in _ONCE_FIELDS or getattr(recipe, name, None) != fields[name]:
            known = ", ".join(sorted(names))
            raise AdapterError(f"{peft_type} has no field {name!r}; it has {known}")
    return recipe


def _saved_names(method: type[Recipe]) -> dict[str, str]:
    """Return the names of a recipe's fields, by their names in a manifest."""
    fields = dataclasses.fields(method)
    return {str(each.metadata.get("saved", each.name)): each.name for each in fields}
