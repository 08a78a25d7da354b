"""Folders of states and checkpoints in the server's store.

tinker/KEY/          a state, or an adapter, as a row names it; a start discards others
tinker_runs/MODEL/   the record of a model's training
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Collection
from pathlib import Path

from pcg.errors import FinetuneError, PcgError
from pcg.files import drop_files, sync_names
from pcg.serve.adapters.loader import Origin
from pcg.serve.engine.engine_names import engine_name
from pcg.serve.store.store import Store

_ROOT, _RUNS = "tinker", "tinker_runs"
_STATE_ALONE = ("optimizer.safetensors", "trainer_state.json")
"""The files of a state that an adapter does not have."""


def run_folder(model: str) -> str:
    """Return the folder of the record of a model, relative to the store's."""
    return f"{_RUNS}/{model.replace(':', '-')}"


def adapter_name(tenant: str, folder: str) -> str:
    """Return the engine's name of a tenant's adapter that a folder has."""
    return engine_name(tenant, f"tinker-{hashlib.sha256(folder.encode()).hexdigest()[:32]}")


def checkpoint_origin() -> Origin:
    """Return the origin of an adapter that a folder has: it may be unloaded for others."""
    return Origin("the checkpoint", int(time.time()), is_found=True)


class Folders:
    """The folders that a store has for Tinker's protocol.

    Attributes:
        root: the folder of the store.
    """

    def __init__(self, store: Store) -> None:
        self.root = store.folder
        self._store = store
        (self.root / _ROOT).mkdir(exist_ok=True)
        self._before = [one.name for one in (self.root / _ROOT).iterdir()]

    def new(self) -> str:
        """Return a folder that is not there yet, relative to the store's."""
        return f"{_ROOT}/{secrets.token_hex(16)}"

    def path(self, folder: str) -> Path:
        """Return where a folder is."""
        return self.root / folder

    def remove(self, folder: str) -> None:
        """Remove a folder with all that is in it."""
        shutil.rmtree(self.path(folder), ignore_errors=True)

    def link(self, source: str, folder: str) -> None:
        """Make a folder whose files are those of another one. FinetuneError: that is gone."""
        try:
            shutil.copytree(self.path(source), self.path(folder), copy_function=os.link)
        except (OSError, shutil.Error) as error:
            self.remove(folder)
            raise FinetuneError("the checkpoint is gone, or cannot be linked") from error
        sync_names(self.path(folder))

    def strip(self, folder: str) -> None:
        """Leave a state's adapter alone."""
        drop_files(self.path(folder), _STATE_ALONE)
        sync_names(self.path(folder))

    def run(self, model: str) -> Path:
        """Return where the record of a model is."""
        return self.root / run_folder(model)

    def size_bytes(self, folder: str) -> int:
        """Count the bytes of a folder's files."""
        return sum(one.stat().st_size for one in self.path(folder).iterdir() if one.is_file())

    def without_paths(self, error: Exception) -> Exception:
        """Return an error whose text does not tell where the server's folders are."""
        text = str(error)
        if not isinstance(error, PcgError) or str(self.root) not in text:
            return error
        return FinetuneError(text.replace(f"{self.root}/", "").replace(str(self.root), ""))

    def sweep(self, named: Collection[str]) -> None:
        """Remove what was there at the start and no row names, or move it to quarantine."""
        names = [f"{_ROOT}/{name}" for name in self._before]
        self._store.discard([self.root / name for name in names if name not in named])
