"""Files: reads whose damage is named by its place, and writes that outlast a power failure.

Whatever is read from a file or a wire and parsed comes through here, so that a name that no system
has, nested JSON, a number of 10,000 digits and half a character are errors of pcg's like others.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pcg.errors import PcgError
from pcg.units import shown

_LONGEST_SHOWN = 300
"""Characters of a path in a message."""
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
"""Linux' own numbers."""


def expanded(path: str | os.PathLike[str]) -> Path:
    """The path with a home directory for `~`, where there is one."""
    try:
        return Path(path).expanduser()
    except RuntimeError:  # no such user
        return Path(path)


def shown_path(path: Path) -> str:
    """A path as a message shows it: cut, and with escapes for what cannot be printed."""
    text = str(path).encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 1]}…"


def is_file(path: Path) -> bool:
    """Return whether a file is there that may be looked at; no name is an error."""
    try:
        return path.is_file()
    except (OSError, ValueError):  # too long, in a closed directory, or no name at all
        return False


def is_directory(path: Path) -> bool:
    """Return whether a directory is there that may be looked at; no name is an error."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def is_there(path: Path) -> bool:
    """Return whether anything is there that may be looked at; no name is an error."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def read_bytes(path: Path, error_type: type[PcgError], fix: str = "") -> bytes:
    """The content of a file; arguments and errors as of `read_json`."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise error_type(f"{shown_path(path)} cannot be read: {error.strerror}{fix}") from error
    except ValueError as error:  # half a character or a zero byte in the name
        raise error_type(f"{shown_path(path)} cannot be read: it is no name of a file") from error


def read_text(path: Path, error_type: type[PcgError], fix: str = "") -> str:
    """The text in a file in UTF-8; arguments and errors as of `read_json`."""
    try:
        return read_bytes(path, error_type, fix).decode()
    except UnicodeDecodeError as error:
        raise error_type(f"{path} is damaged: byte {error.start} is not UTF-8{fix}") from error


def read_json(path: Path, error_type: type[PcgError], fix: str = "") -> dict[str, Any]:
    """The object in a JSON file.

    Args:
        path: the file.
        error_type: the class of the errors.
        fix: the end of their messages, as "; download it again".
    Raises:
        error_type: the file cannot be read, is damaged, or holds something else.
    """
    return json_object(read_bytes(path, error_type, fix), str(path), error_type, fix)


def json_object(
    content: str | bytes, name: str, error_type: type[PcgError], fix: str = ""
) -> dict[str, Any]:
    """The object in the content of a JSON file; arguments and errors as of `read_json`."""
    value = json_value(content, name, error_type, fix)
    if not isinstance(value, dict):
        raise error_type(f"{name} holds a {type(value).__name__}, not an object{fix}")
    return value


def json_value(content: str | bytes, name: str, error_type: type[PcgError], fix: str = "") -> Any:
    """The value in JSON text; arguments and errors as of `read_json`, but for its kind."""
    try:
        return json.loads(content.decode() if isinstance(content, bytes) else content)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise error_type(f"{name} is damaged at {where}: {error.msg}{fix}") from error
    except UnicodeDecodeError as error:
        raise error_type(f"{name} is damaged: byte {error.start} is not UTF-8{fix}") from error
    except RecursionError as error:
        raise error_type(f"{name} is damaged: JSON nested too deeply{fix}") from error
    except ValueError as error:
        raise error_type(f"{name} is damaged: a number with too many digits{fix}") from error


@contextlib.contextmanager
def damage_of(what: str, error_type: type[PcgError], fix: str = "") -> Iterator[None]:
    """Refuse content of wrong kinds, which the block reads: what it raises is damage of `what`.

    Raises:
        error_type: the block raised what no PcgError is.
    """
    try:
        yield
    except PcgError:
        raise
    except Exception as error:  # which, the content decides
        why = f"{type(error).__name__}: {shown(str(error), 200)[1:-1]}"
        raise error_type(f"{what} is damaged ({why}){fix}") from error


def cache_folder(name: str) -> Path:
    """The user's folder for what pcg can make again, below `XDG_CACHE_HOME` if that is set."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "pcg" / name


def check_no_lfs_pointer(path: Path, error_type: type[PcgError]) -> None:
    """Refuse a pointer of Git LFS in the place of a file of weights."""
    try:
        with path.open("rb") as stream:
            start = stream.read(24)
    except OSError as error:
        raise error_type(f"{path} cannot be read: {error.strerror}") from error
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
    try:
        place = expanded(directory).resolve()
        with contextlib.suppress(FileNotFoundError):
            place.lstat()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is no name of a directory"
        raise error_type(
            f"{what} cannot be saved in {shown_path(directory)}: {reason}; give another directory"
        ) from error
    while not os.path.lexists(place):
        place = place.parent
    if not place.is_dir():
        raise error_type(
            f"{what} cannot be saved in {directory}: {place} is a file; give another directory"
        )
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".saving-", dir=place))
    except OSError as error:
        at = "" if place == directory else f" at {place}"
        raise error_type(
            f"{what} cannot be saved in {directory}: {error.strerror}{at}; give another directory"
        ) from error


def exchange(one: Path, other: Path) -> bool:
    """Swap what two paths of a file system name, in one step.

    Returns:
        False where the system or the file system cannot; nothing has changed then.
    Raises:
        OSError: they cannot be renamed.
    Source: renameat2(2), RENAME_EXCHANGE.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if sys.platform != "linux" or rename is None:
        return False
    if not rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(other))


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
