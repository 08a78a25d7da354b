"""Roots: the folders from which adapters may be loaded, and no others.

A name becomes one folder right under a root. A path of a client lies under a root, or is a static
module's, after all links are followed; so do the files that are read. What is elsewhere does not
exist: clients learn nothing of the machine's files.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from pcg.errors import ServeError
from pcg.files import SUMS
from pcg.peft.reader import CONFIG, WEIGHTS


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
