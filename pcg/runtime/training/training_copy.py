"""The training copy: the adapter that a finetuning job trains, with tensors of its own.

Training changes tensors in place, so they are shared neither with the caller nor with a file.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import torch

from pcg.errors import FinetuneError
from pcg.peft.adapter import Adapter, check_fits, with_shared
from pcg.peft.recipe import Recipe
from pcg.peft.registry import is_shorthand, recipe_from, recipe_of_fields
from pcg.runtime.model.state import ModelState
from pcg.runtime.requests.compared import adapter_facts


def start_adapter(
    state: ModelState, name: str, peft: object, seed: int, saved: Adapter | None, total_steps: int
) -> Adapter:
    """Return the adapter to train: present, new, or from a checkpoint.

    Args:
        peft: the recipe of a new adapter, as `Executor.add_adapter` takes it; None for the one that
            the program was compiled for under that name, else "lora".
        saved: the adapter of a checkpoint to resume from.
    Raises:
        FinetuneError: `peft`, the present adapter and the saved one differ in their recipe.
        UnsupportedError: the recipe has a feature that pcg does not support.
    """
    there = state.adapters.get(name)
    is_path = isinstance(peft, str | os.PathLike) and not is_shorthand(peft)
    if there is not None and peft is not None:
        if is_path:
            raise FinetuneError(
                f"there is an adapter {name!r} already, and peft={str(peft)!r} would start from "
                "another; leave peft out, or remove the adapter first"
            )
        wanted = _sites_of_recipe(state, recipe_from(peft))
        _check_same(name, "peft=", wanted, "the adapter that is there", _sites(there))
    if saved is not None:
        if there is not None:
            _check_same(name, "the checkpoint", _sites(saved), "this run", _sites(there))
        elif peft is not None and not is_path:
            wanted = _sites_of_recipe(state, recipe_from(peft))
            _check_same(name, "the checkpoint", _sites(saved), "peft=", wanted)
        return saved_adapter(state, saved)
    if there is None:
        if peft is None:
            compiled = state.program.recipes.get(name)
            peft = "lora" if compiled is None else recipe_of_fields(compiled)
        there = state.make_adapter(name, peft, seed=seed)
    recipe = there.recipe.for_job(total_steps)
    return state.for_training(dataclasses.replace(owned(there), recipe=recipe))


def start_facts(begun: tuple[Any, Adapter]) -> Mapping[str, str]:
    """Return the texts of a job's start, of its checkpoint and its adapter, that ranks compare."""
    checkpoint, adapter = begun
    step = "none" if checkpoint is None else f"step {checkpoint.state.step}"
    return {"the checkpoint to go on from": step, **adapter_facts(adapter)}


def saved_adapter(state: ModelState, saved: Adapter) -> Adapter:
    """Return an adapter to train with the values of a checkpoint's, which has to fit the model."""
    base = state.program.base
    shapes = base.module_shapes()
    check_fits(saved, shapes, state.program.name, base.output_module)
    return state.for_training(owned(with_shared(saved, shapes)))


def check_same_recipe(name: str, one: str, first: Adapter, other: str, second: Adapter) -> None:
    """Raise a FinetuneError that says how two adapters differ in their recipe, if they do."""
    _check_same(name, one, _sites(first), other, _sites(second))


def owned(adapter: Adapter) -> Adapter:
    """Return the adapter with copies of its tensors."""
    return adapter.map(torch.clone)


def overwrite(adapter: Adapter, values: Adapter) -> None:
    """Copy values into an adapter's own tensors."""
    with torch.no_grad():
        for tensor, value in zip(adapter.tensors, values.tensors, strict=True):
            tensor.copy_(value)


_Sites = tuple[Mapping[str, object], Recipe]
"""The sites of a recipe by module, and the recipe."""


def _sites(adapter: Adapter) -> _Sites:
    sites = {path: weights.bypass for path, weights in adapter.weights.items()}
    return sites, adapter.recipe


def _sites_of_recipe(state: ModelState, recipe: Recipe) -> _Sites:
    model_type = str(state.program.config["model_type"])
    return recipe.bypasses_in(state.program.base, model_type), recipe


def _check_same(name: str, one: str, first: _Sites, other: str, second: _Sites) -> None:
    """Raise a FinetuneError if two adapters differ in their recipe."""
    difference = ""
    before, after = first[1], second[1]
    if before.bias != after.bias:
        difference = f'bias="{before.bias}" and {other} "{after.bias}"'
    if before.dropout != after.dropout:
        difference = f"dropout {before.dropout:g} and {other} {after.dropout:g}"
    if before.encoder != after.encoder:
        difference = f"{before.encoder or 'no encoder'} and {other} {after.encoder or 'none'}"
    if type(before) is type(after):
        for field, value in before.schedule.items():
            if after.schedule.get(field, value) != value:
                difference = f"{field}={value} and {other} {after.schedule[field]}"
    for path in [*first[0], *second[0]]:
        a, b = first[0].get(path), second[0].get(path)
        if a != b and not difference:
            difference = f"{a or 'none'} at {path or 'the model'} and {other} {b or 'none'}"
    if difference:
        raise FinetuneError(
            f"adapter {name!r}: {one} has {difference}; use the same recipe, or another name and "
            "checkpoint_dir"
        )
