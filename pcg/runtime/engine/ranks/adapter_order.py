"""Orders of adapters: the files of a saved one, or the recipe of a fresh one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from pcg.files import expanded
from pcg.peft.adapter import Adapter
from pcg.peft.adapter_files import CONFIG, WEIGHTS
from pcg.peft.registry import is_shorthand, recipe_fields, recipe_from, recipe_of_fields
from pcg.ranks.agreement import agreed
from pcg.runtime.engine.ranks.orders import Put
from pcg.runtime.model.state import ModelState
from pcg.runtime.requests.compared import adapter_facts


def put_order(name: str, path_or_config: object, seed: int) -> Put:
    """Return the order of an adapter, whose files are read now.

    Raises:
        OSError: a file cannot be read.
        AdapterError, UnsupportedError: it is no recipe.
    """
    if isinstance(path_or_config, str | os.PathLike) and not is_shorthand(path_or_config):
        directory = expanded(path_or_config)
        files = {file: (directory / file).read_bytes() for file in (CONFIG, WEIGHTS)}
        return Put(name, seed, None, files)
    return Put(name, seed, recipe_fields(recipe_from(path_or_config)), {})


def adapter_of(order: Put, state: ModelState) -> Adapter:
    """Return the adapter of an order, as `ModelState.make_adapter` does, with its own tensors."""
    if order.recipe is not None:
        recipe = recipe_of_fields(order.recipe)
        return state.make_adapter(order.name, recipe, seed=order.seed)
    with tempfile.TemporaryDirectory(prefix="pcg-adapter-") as folder:
        for file, content in order.files.items():
            (Path(folder) / file).write_bytes(content)
        # Tensors are mapped, and the files go.
        return state.make_adapter(order.name, Path(folder), seed=order.seed).map(torch.clone)


def put_adapter(state: ModelState, name: str, make: Callable[[], Adapter]) -> Adapter:
    """Serve what each rank makes, if it is the same on all; every rank calls this at once.

    Raises:
        PcgError: one of them could not make it, or made another.
    """
    made = agreed(state.world, f"add_adapter({name!r})", make, adapter_facts)
    return state.put_adapter(made, state.program_for(made))
