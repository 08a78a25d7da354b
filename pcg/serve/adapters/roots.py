"""Folders of adapters: `--lora-roots`, static `--lora-modules`, and loading from them by name.

A name selects a folder directly under a root. A client's path must be under a root or be a static
module's folder, after all links are resolved; so must the adapter's files. Other paths are
treated as missing, so that clients learn nothing about the machine's files.

Requests that name an adapter while it is being loaded share the load. A failed load is retried only
after a pause, so that repeated requests cost nothing.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from pcg.errors import AdapterConflictError, ModelNotFoundError, ServeError
from pcg.files import SUMS, is_file, shown_path
from pcg.peft.adapter_files import CONFIG, WEIGHTS
from pcg.runtime.adapters.cache import ServedAdapter
from pcg.serve.adapters.loader import Loader, Origin, refusal
from pcg.serve.http.errors import ApiError
from pcg.source import adapter_directory


class Roots:
    """Allowed folders.

    Args:
        folders: parents of adapters' folders.
        modules: folders of further adapters, such as static modules.
    Raises:
        ServeError: a root is not a folder.
    """

    def __init__(self, folders: Iterable[str | Path], modules: Iterable[str | Path] = ()) -> None:
        self._folders = [Path(os.path.realpath(folder)) for folder in folders]
        self._modules = [Path(os.path.realpath(module)) for module in modules]
        for folder in self._folders:
            if not folder.is_dir():
                raise ServeError(f"--lora-roots {folder} is not a folder; create it, or omit it")

    def __bool__(self) -> bool:
        return bool(self._folders)

    def named(self, name: str) -> Path | None:
        """Return the folder with a name in the first root that has it, or None."""
        is_one_part = name == os.path.basename(name) and not name.startswith(".")
        if not is_one_part or "\\" in name or not name:
            return None
        return next(self._within(name, self._folders), None)

    def at(self, path: str) -> Path | None:
        """Return the adapter at a path, absolute or under a root; None if it may not be read."""
        if not path:
            return None
        directory = next(self._within(path, self._folders), None)
        if directory is None and os.path.isabs(path):
            modules = [module for module in self._modules if str(module) == _real(path)]
            directory = next((each for m in modules for each in self._within("", [m])), None)
        return directory

    def _within(self, path: str, roots: Iterable[Path]) -> Iterator[Path]:
        for root in roots:
            try:
                # Joining a root with an absolute path gives the absolute path.
                directory = Path(os.path.realpath(root / path))
                if directory.is_relative_to(root) and _has_files_within(directory, root):
                    yield directory
            except (OSError, ValueError):  # an invalid path
                continue


def _real(path: str) -> str | None:
    try:
        return os.path.realpath(path)
    except (OSError, ValueError):  # an invalid path
        return None


def _has_files_within(directory: Path, root: Path) -> bool:
    """Return True if a folder has a configuration and all its files are inside the root."""
    files = [Path(os.path.realpath(directory / name)) for name in (CONFIG, WEIGHTS, SUMS)]
    return files[0].is_file() and all(file.is_relative_to(root) for file in files)


_AGAIN_S = 5.0
"""Time after which a failed load is retried, seconds."""
_FAILED = 1024
"""Maximum number of remembered failures."""


class Resolver:
    """Finds and loads the operator's adapters by name; for a single event loop."""

    def __init__(self, loader: Loader, roots: Roots) -> None:
        self._loader = loader
        self._roots = roots
        self._loading: dict[str, asyncio.Task[ServedAdapter | None]] = {}
        self._failed: dict[str, tuple[float, str]] = {}

    async def resolve(self, name: str, tenant: str) -> ServedAdapter | None:
        """Load the adapter with a name for a tenant; return None if no root has it.

        Raises:
            ApiError: 400, it cannot be loaded; 503, there is no free place.
        """
        if not self._roots:
            return None
        until, message = self._failed.get(name, (0.0, ""))
        if time.monotonic() < until:
            raise refusal(message)
        task = self._loading.get(name)
        if task is None:
            task = self._loading[name] = asyncio.create_task(self._load(name, tenant))
            task.add_done_callback(lambda task: self._end(name, task))
        return await asyncio.shield(task)

    async def _load(self, name: str, tenant: str) -> ServedAdapter | None:
        directory = await asyncio.to_thread(self._roots.named, name)
        if directory is None:
            return None
        origin = Origin(name, int(time.time()), is_found=True)
        try:
            return await self._loader.load(name, directory, origin, tenant=tenant)
        except AdapterConflictError:  # a client has loaded it by name
            return self._loader.adapters.get(name)

    def _end(self, name: str, task: asyncio.Task[ServedAdapter | None]) -> None:
        del self._loading[name]
        error = None if task.cancelled() else task.exception()
        self._failed.pop(name, None)
        if isinstance(error, ApiError) and error.status_code == 400:
            if len(self._failed) == _FAILED:
                del self._failed[next(iter(self._failed))]
            self._failed[name] = time.monotonic() + _AGAIN_S, str(error.detail)


@dataclass(frozen=True)
class LoraModule:
    """A static adapter; `base_model_name` is the parent in its model card, or None."""

    name: str
    path: Path
    base_model_name: str | None = None


def parse_modules(texts: Sequence[str]) -> list[LoraModule]:
    """Parse `NAME=PATH`, or a JSON object of name, path and base_model_name, as vLLM does.

    Raises:
        ServeError: a text is invalid, or a name is repeated.
    """
    modules = [_parse(text) for text in texts]
    names = [module.name for module in modules]
    for name in names:
        if names.count(name) > 1:
            raise ServeError(f"--lora-modules has {name!r} twice; give each its own name")
    return modules


def check_modules(texts: Sequence[str]) -> None:
    """Raise a ServeError for an invalid module, or a folder without an adapter."""
    for module in parse_modules(texts):
        if not is_file(module.path / CONFIG):
            raise ServeError(
                f"--lora-modules {module.name}={shown_path(module.path)}: {CONFIG} is missing; "
                "give the folder of a saved adapter"
            )


class _Fields(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(min_length=1)]
    path: Annotated[str, msgspec.Meta(min_length=1)]
    base_model_name: str | None = None


def _parse(text: str) -> LoraModule:
    name, equals, path = text.partition("=")
    if not text.lstrip().startswith("{"):
        if name and equals and path:
            return LoraModule(name, _directory(name, path))
    else:
        try:
            fields = msgspec.json.decode(text, type=_Fields)
            directory = _directory(fields.name, fields.path)
            return LoraModule(fields.name, directory, fields.base_model_name or None)
        except msgspec.ValidationError:
            pass
        except msgspec.DecodeError as error:
            raise ServeError(f"--lora-modules {text} is not JSON: {error}") from error
    raise ServeError(
        f'--lora-modules {text}; use NAME=PATH, or {{"name": …, "path": …, "base_model_name": …}}'
    )


def _directory(name: str, path: str) -> Path:
    try:
        return adapter_directory(path)
    except ModelNotFoundError as error:
        raise ServeError(f"--lora-modules {name}={path}: {error}") from error
