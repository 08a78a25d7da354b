"""Files of a trainer's state: those of a checkpoint, in one directory.

A state is written beside its place and renamed, so that a path holds a whole one or none.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from pcg.errors import AdapterError, FinetuneError
from pcg.files import SUMS, expanded, is_directory, is_file, shown_path, sync_names
from pcg.runtime.training.checkpoints import STATE, Checkpoint, CheckpointStore, write_checkpoint
from pcg.units import shown

_OPTIMIZER = "optimizer"


def write_state(path: str | Path, checkpoint: Checkpoint, *, overwrite: bool) -> Path:
    """Write a state; returns its directory.

    Raises:
        FinetuneError: it cannot be written, or something is there; that stays as it is.
    """
    place = expanded(path)
    beside = place.parent / f".{place.name}-{secrets.token_hex(4)}"
    old = beside.with_name(f"{beside.name}-old")
    try:
        if place.exists() and not (overwrite and (place / STATE).is_file()):
            fix = "give overwrite=True, or another path" if not overwrite else "give another path"
            what = "a state" if (place / STATE).is_file() else "something that is no state"
            raise FinetuneError(f"there is {what} at {place} already; {fix}")
        inside = [one.name for one in place.iterdir() if one.is_dir()] if place.exists() else []
        if inside:  # such as another state
            raise FinetuneError(
                f"the state at {place} has the directory {shown(inside[0])} in it, which would "
                "be lost; move it, or give another path"
            )
        place.parent.mkdir(parents=True, exist_ok=True)
        write_checkpoint(checkpoint, beside)
        if place.exists():
            place.rename(old)
        beside.rename(place)
        sync_names(place.parent)
    except (OSError, SafetensorError, AdapterError) as error:
        if is_directory(old) and not place.exists():
            old.rename(place)
        raise FinetuneError(f"the state cannot be saved at {place}: {error}") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
    return place


def read_state(
    path: str | Path, name: str, facts: Mapping[str, Any], optimizer: bool
) -> tuple[Path, Checkpoint]:
    """Read a state that was written for the same base; returns its directory, too.

    Args:
        name: the adapter's name, whatever it was when it was saved.
        facts: what has to be as it was: of the base, and the optimizer's name.
        optimizer: the optimizer is wanted, and has to be the same.
    Raises:
        FinetuneError: there is none, it is damaged, or it is of another base or optimizer.
    """
    place = expanded(path)
    if not is_file(place / STATE) and not is_file(place / SUMS):
        raise FinetuneError(f"there is no state at {place}; give the path of a saved one")
    store = CheckpointStore(place.parent)
    try:
        found = store.load(place, name)
    except FinetuneError as error:
        what, good = str(error).partition(";")[0], store.good_beside(place)
        other = "another state" if good is None else f"the last good one, {shown_path(good)}"
        raise FinetuneError(f"{what}; load {other}") from error
    for key, own in facts.items():
        saved = found.trajectory.get(key)
        if saved != own and (optimizer or key != _OPTIMIZER):
            fix = "load it with optimizer=False" if key == _OPTIMIZER else "load one of this base"
            raise FinetuneError(
                f"the state {place} has {key} {shown(saved)}, and the trainer {shown(own)}; {fix}"
            )
    return place, found
