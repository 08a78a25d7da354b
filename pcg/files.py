"""File reads with precise errors, and writes that survive a power failure.

All files and wire data that pcg parses are read by these functions, so that an invalid name, deeply
nested JSON, a number of 10,000 digits and an unpaired surrogate raise pcg's errors.

pcg saves checksums with its files. `seal` writes SHA256SUMS into a complete folder, in the format
of sha256sum(1), and `check_sums` refuses files that differ. While a file of a sealed folder is
being replaced, SHA256SUMS has two lines for it, and either may match.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import json
import os
import re
import secrets
import stat
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pcg.errors import PcgError
from pcg.units import shown

SUMS = "SHA256SUMS"
"""Name of the file with a folder's checksums."""
_SUM = re.compile(r"([0-9a-f]{64}) [ *](.+)")
_MOST_SUMS_BYTES = 2**20
_LONGEST_SHOWN = 300
"""Maximum characters of a path in a message."""
_KINDS = {
    type(None): "null",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
}
"""JSON values other than objects, for messages."""
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
"""Constants of Linux."""


def expanded(path: str | os.PathLike[str]) -> Path:
    """Return a path with `~` expanded, if the user has a home directory."""
    try:
        return Path(path).expanduser()
    except RuntimeError:  # no such user
        return Path(path)


def shown_path(path: Path) -> str:
    """Return a path for a message: truncated, with unprintable characters escaped."""
    text = str(path).encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 1]}…"


def is_file(path: Path) -> bool:
    """Return whether a readable entry is a file; never raises."""
    try:
        return path.is_file()
    except (OSError, ValueError):  # too long, in an unreadable directory, or an invalid name
        return False


def is_directory(path: Path) -> bool:
    """Return whether a readable entry is a directory; never raises."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def is_there(path: Path) -> bool:
    """Return whether a readable entry exists; never raises."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def read_bytes(path: Path, error_type: type[PcgError], fix: str = "") -> bytes:
    """Return the content of a file; arguments and errors as in `read_json`."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):  # a device may have no end
            raise error_type(f"{shown_path(path)} is a device, not a file{fix}")
        return path.read_bytes()
    except OSError as error:
        raise error_type(f"{shown_path(path)} cannot be read: {error.strerror}{fix}") from error
    except ValueError as error:  # an unpaired surrogate or a zero byte in the name
        raise error_type(f"{shown_path(path)} cannot be read: the name is invalid") from error


def read_text(path: Path, error_type: type[PcgError], fix: str = "") -> str:
    """Return the text of a UTF-8 file; arguments and errors as in `read_json`."""
    try:
        return read_bytes(path, error_type, fix).decode()
    except UnicodeDecodeError as error:
        raise error_type(f"{path} is damaged: byte {error.start} is not UTF-8{fix}") from error


def read_json(path: Path, error_type: type[PcgError], fix: str = "") -> dict[str, Any]:
    """Return the object in a JSON file.

    Args:
        error_type: the class of the errors.
        fix: the end of their messages, such as "; download it again".
    Raises:
        error_type: the file cannot be read, is damaged, or has another JSON value.
    """
    return json_object(read_bytes(path, error_type, fix), str(path), error_type, fix)


def json_object(
    content: str | bytes, name: str, error_type: type[PcgError], fix: str = ""
) -> dict[str, Any]:
    """Return the object in JSON text; arguments and errors as in `read_json`."""
    value = json_value(content, name, error_type, fix)
    if not isinstance(value, dict):
        raise error_type(f"{name} holds {_KINDS[type(value)]}, not an object{fix}")
    return value


def json_value(content: str | bytes, name: str, error_type: type[PcgError], fix: str = "") -> Any:
    """Return the value in JSON text; arguments and errors as in `read_json`."""
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
    """Convert an error of the block, which parses `what`, to `error_type`; PcgErrors pass."""
    try:
        yield
    except PcgError:
        raise
    except Exception as error:  # damaged content may raise any error
        why = f"{type(error).__name__}: {shown(str(error), 200)[1:-1]}"
        raise error_type(f"{what} is damaged ({why}){fix}") from error


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits. OSError: it cannot be read."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def seal(folder: Path) -> None:
    """Write SHA256SUMS of all files of a folder, and wait until all are on disk.

    Hashing runs in parallel with syncing. OSError: a file cannot be read or written.
    """
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != SUMS)
    with ThreadPoolExecutor() as threads:
        synced = [threads.submit(sync, file) for file in files]
        sums = {
            path.name: {digest}
            for path, digest in zip(files, threads.map(sha256_of, files), strict=True)
        }
        for each in synced:
            each.result()
    write_sums(folder, sums)


def write_sums(folder: Path, sums: Mapping[str, Collection[str]]) -> None:
    """Write a folder's SHA256SUMS atomically, from digests by name. OSError: the write failed."""
    lines = [f"{digest}  {name}\n" for name in sorted(sums) for digest in sorted(sums[name])]
    beside = folder / f".{SUMS}-{secrets.token_hex(4)}"
    try:
        write_text(beside, "".join(lines))
        beside.replace(folder / SUMS)
    finally:
        beside.unlink(missing_ok=True)
    sync_names(folder)


def read_sums(
    folder: Path, error_type: type[PcgError], fix: str = ""
) -> dict[str, set[str]] | None:
    """Return the digests in a folder's SHA256SUMS by name, or None without the file.

    Raises:
        error_type: SHA256SUMS cannot be read, or is damaged.
    """
    path = folder / SUMS
    if not is_there(path):
        return None
    with damage_of(shown_path(path), error_type, fix):
        if path.stat().st_size > _MOST_SUMS_BYTES or not path.is_file():
            raise ValueError(f"it is not a file of at most {_MOST_SUMS_BYTES} bytes")
        lines = read_text(path, error_type, fix).splitlines()
    sums: dict[str, set[str]] = {}
    for number, line in enumerate(lines, start=1):
        match = _SUM.fullmatch(line)
        if match is None:
            raise error_type(f"{shown_path(path)} is damaged at line {number}{fix}")
        sums.setdefault(match[2], set()).add(match[1])
    return sums


def check_sums(
    folder: Path,
    names: Collection[str],
    error_type: type[PcgError],
    fix: str = "",
    *,
    is_whole: bool = False,
) -> None:
    """Refuse files of a folder that differ from its SHA256SUMS.

    Args:
        names: the files that will be read; each needs a line in SHA256SUMS.
        fix: the end of messages, as in `read_json`.
        is_whole: check every listed file, and refuse a folder without SHA256SUMS; by default such a
            folder passes, as other programs write no checksums.
    Raises:
        error_type: a file, or SHA256SUMS, is missing or damaged.
    """
    sums = read_sums(folder, error_type, fix)
    if sums is None:
        if is_whole:
            raise error_type(f"{shown_path(folder / SUMS)} is missing{fix}")
        return
    for name in dict.fromkeys([*names, *(sums if is_whole else ())]):
        path = folder / name
        if name not in sums or os.sep in name:
            raise error_type(f"{shown_path(folder / SUMS)} is damaged: no line of {name}{fix}")
        try:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):  # a device may have no end
                raise error_type(f"{shown_path(path)} is not a regular file{fix}")
            size_bytes, digest = status.st_size, sha256_of(path)
        except FileNotFoundError as error:
            raise error_type(f"{shown_path(path)} is missing, but {SUMS} names it{fix}") from error
        except OSError as error:
            raise error_type(f"{shown_path(path)} cannot be read: {error.strerror}{fix}") from error
        if digest not in sums[name]:
            raise error_type(
                f"{shown_path(path)} is damaged: the SHA-256 of its {size_bytes} bytes is "
                f"{digest[:12]}…, and {SUMS} has {min(sums[name])[:12]}…{fix}"
            )


@contextlib.contextmanager
def verified(check: Callable[[], None]) -> Iterator[None]:
    """Run a check after the block; if the block fails, the check's error is added to its error.

    Args:
        check: raises the PcgError of damaged files, as `check_sums` does.
    """
    try:
        yield
    except PcgError as error:
        try:
            check()
        except PcgError as damage:
            raise type(error)(f"{error}; {damage}") from error
        raise
    check()


def drop_files(folder: Path, names: Collection[str]) -> None:
    """Remove files of a folder and their lines in SHA256SUMS. OSError: a file cannot be removed."""
    for name in names:
        (folder / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError, PcgError):  # a full disk keeps the lines, which are harmless
        sums = read_sums(folder, PcgError)
        if sums is not None and not sums.keys().isdisjoint(names):
            write_sums(folder, {name: sums[name] for name in sums if name not in names})


def cache_folder(name: str) -> Path:
    """Return the user's cache folder with a name, under `XDG_CACHE_HOME` if it is set."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "pcg" / name


def check_no_lfs_pointer(path: Path, error_type: type[PcgError]) -> None:
    """Refuse a Git LFS pointer in place of a weight file."""
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
    """Refuse an existing or future directory without write access; leave it unchanged.

    Args:
        what: the content to save, for the error.
    """
    try:
        place = expanded(directory).resolve()
        with contextlib.suppress(FileNotFoundError):
            place.lstat()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "the name is invalid"
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


def exchange(first: Path, other: Path) -> bool:
    """Swap two paths of a file system atomically.

    Returns:
        False if the system or the file system does not support it; nothing is changed.
    Raises:
        OSError: the paths cannot be renamed.
    Source: renameat2(2), RENAME_EXCHANGE.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if sys.platform != "linux" or rename is None:
        return False
    if not rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(other))


@contextlib.contextmanager
def replacing(target: Path, error_type: type[PcgError]) -> Iterator[Path]:
    """Yield a path beside a file, which replaces the file when the block has written it.

    Raises:
        error_type: the file cannot be written; what was there stays.
    """
    beside = target.with_name(f".{target.name}-{secrets.token_hex(4)}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield beside
        sync(beside)
        beside.replace(target)
    except OSError as error:
        raise error_type(f"{target} cannot be written: {error.strerror or error}") from error
    finally:
        beside.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file's content is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(file: Path, text: str) -> None:
    """Write a UTF-8 text and wait until it is on disk. OSError: it cannot be written."""
    file.write_text(text, encoding="utf-8")
    sync(file)


def sync_names(directory: Path) -> None:
    """Make renames in a directory survive a power failure; some file systems cannot."""
    with contextlib.suppress(OSError):
        sync(directory)
