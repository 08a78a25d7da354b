"""Folders of adapters, and the adapters that are loaded from them by name.

Roots: the folders from which adapters may be loaded, and no others.

A name becomes one folder right under a root. A path of a client lies under a root, or is a static
module's, after all links are followed; so do the files that are read. What is elsewhere does not
exist: clients learn nothing of the machine's files.

The resolver: adapters under `--lora-roots`, loaded when a request first names them.

A name is one folder right under a root (`roots.py`). Requests that name it while it is loaded wait
for the one load; one that failed is tried again after a while, so that asking again costs nothing.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from pcg.errors import AdapterConflictError, ServeError
from pcg.files import SUMS
from pcg.peft.adapter_files import CONFIG, WEIGHTS
from pcg.runtime.adapters.cache import ServedAdapter
from pcg.serve.adapters.loader import Loader, Origin, refusal
from pcg.serve.http.errors import ApiError

# -------------------------------------------------------------------------------------------- roots


class Roots:
    """Allow-listed folders.

    Args:
        folders: adapters lie in folders under them.
        modules: adapters that may be loaded beside these, such as static modules.
    Raises:
        ServeError: a root is no folder.
    """

    def __init__(self, folders: Iterable[str | Path], modules: Iterable[str | Path] = ()) -> None:
        self._folders = [Path(os.path.realpath(folder)) for folder in folders]
        self._modules = [Path(os.path.realpath(module)) for module in modules]
        for folder in self._folders:
            if not folder.is_dir():
                raise ServeError(f"--lora-roots {folder} is no folder; make it, or leave it out")

    def __bool__(self) -> bool:
        """True if there is a folder under which names are looked up."""
        return bool(self._folders)

    def named(self, name: str) -> Path | None:
        """Return the adapter right under a root of that name, the first one; None without."""
        is_one_part = name == os.path.basename(name) and not name.startswith(".")
        if not is_one_part or "\\" in name or not name:
            return None
        return next(self._found(name, self._folders), None)

    def at(self, path: str) -> Path | None:
        """Return the adapter at a path, absolute or under a root; None if it may not be read."""
        if not path:
            return None
        found = next(self._found(path, self._folders), None)
        if found is None and os.path.isabs(path):
            modules = (module for module in self._modules if str(module) == _real(path))
            found = next((one for module in modules for one in self._found("", [module])), None)
        return found

    def _found(self, path: str, within: Iterable[Path]) -> Iterator[Path]:
        for root in within:
            try:
                # A root followed by an absolute path is that path.
                directory = Path(os.path.realpath(root / path))
                if directory.is_relative_to(root) and _has_files_within(directory, root):
                    yield directory
            except (OSError, ValueError):  # no path of this system
                continue


def _real(path: str) -> str | None:
    try:
        return os.path.realpath(path)
    except (OSError, ValueError):  # no path of this system
        return None


def _has_files_within(directory: Path, root: Path) -> bool:
    """Return True if a folder has a configuration, and no file that is read lies elsewhere."""
    files = [Path(os.path.realpath(directory / name)) for name in (CONFIG, WEIGHTS, SUMS)]
    return files[0].is_file() and all(file.is_relative_to(root) for file in files)


# ----------------------------------------------------------------------------------------- resolver


_AGAIN_S = 5.0
"""Time after which an adapter that could not be loaded is tried again, seconds."""
_FAILED = 1024
"""Names whose failures are remembered."""


class Resolver:
    """Finds and loads the operator's adapters by their names; for one event loop."""

    def __init__(self, loader: Loader, roots: Roots) -> None:
        self._loader = loader
        self._roots = roots
        self._loading: dict[str, asyncio.Task[ServedAdapter | None]] = {}
        self._failed: dict[str, tuple[float, str]] = {}

    async def resolve(self, name: str, tenant: str) -> ServedAdapter | None:
        """Return the adapter of that name, for a tenant that asks; None if no root has one.

        Raises:
            ApiError: 400, it is there and cannot be loaded; 503, there is no room for it.
        """
        if not self._roots:
            return None
        until, message = self._failed.get(name, (0.0, ""))
        if time.monotonic() < until:
            raise refusal(message)
        task = self._loading.get(name)
        if task is None:
            task = self._loading[name] = asyncio.create_task(self._load(name, tenant))
            task.add_done_callback(lambda done: self._end(name, done))
        return await asyncio.shield(task)

    async def _load(self, name: str, tenant: str) -> ServedAdapter | None:
        directory = await asyncio.to_thread(self._roots.named, name)
        if directory is None:
            return None
        origin = Origin(name, int(time.time()), is_found=True)
        try:
            return await self._loader.load(name, directory, origin, tenant=tenant)
        except AdapterConflictError:  # somebody loaded it by hand meanwhile
            return self._loader.adapters.get(name)

    def _end(self, name: str, done: asyncio.Task[ServedAdapter | None]) -> None:
        del self._loading[name]
        error = None if done.cancelled() else done.exception()
        self._failed.pop(name, None)
        if isinstance(error, ApiError) and error.status_code == 400:
            if len(self._failed) == _FAILED:
                del self._failed[next(iter(self._failed))]
            self._failed[name] = time.monotonic() + _AGAIN_S, str(error.detail)
