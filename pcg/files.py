"""Files: JSON whose damage is named by its place, and writes that outlast a power failure."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from pcg.errors import PcgError


def read_json(path: Path, error_type: type[PcgError], fix: str = "") -> dict[str, Any]:
    """The object in a JSON file.

    Args:
        path: the file.
        error_type: the class of the errors.
        fix: the end of their messages, as "; download it again".
    Raises:
        error_type: the file cannot be read, is damaged, or holds something else.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise error_type(f"{path} cannot be read: {error.strerror}") from error
    return json_object(content, str(path), error_type, fix)


def json_object(
    content: bytes, name: str, error_type: type[PcgError], fix: str = ""
) -> dict[str, Any]:
    """The object in the content of a JSON file; arguments and errors as of `read_json`."""
    try:
        value = json.loads(content.decode())
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise error_type(f"{name} is damaged at {where}: {error.msg}{fix}") from error
    except UnicodeDecodeError as error:
        raise error_type(f"{name} is damaged: byte {error.start} is not UTF-8{fix}") from error
    if not isinstance(value, dict):
        raise error_type(f"{name} holds a {type(value).__name__}, not an object{fix}")
    return value


def cache_folder(name: str) -> Path:
    """The user's folder for what pcg can make again, below `XDG_CACHE_HOME` if that is set."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "pcg" / name


def check_no_lfs_pointer(path: Path, error_type: type[PcgError]) -> None:
    """Refuse a pointer of Git LFS in the place of a file of weights."""
    with path.open("rb") as stream:
        start = stream.read(24)
    if start.startswith(b"version https://git-lfs"):
        raise error_type(
            f"{path} is a Git LFS pointer of {path.stat().st_size} bytes, not the weights; "
            "run `git lfs pull` in its directory"
        )


def check_writable(directory: Path, what: str, error_type: type[PcgError]) -> None:
    """Refuse a directory, made or not, in which nothing can be made; it is left as it was.

    Args:
        what: what would be saved there, for the error.
    """
    place = directory.expanduser().resolve()
    while not os.path.lexists(place):
        place = place.parent
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".saving-", dir=place))
    except OSError as error:
        at = "" if place == directory else f" at {place}"
        raise error_type(
            f"{what} cannot be saved in {directory}: {error.strerror}{at}; give another directory"
        ) from error


def sync(path: Path) -> None:
    """Wait until a file's content is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_names(directory: Path) -> None:
    """Make renames in a directory outlast a power failure; not every file system can."""
    with contextlib.suppress(OSError):
        sync(directory)
