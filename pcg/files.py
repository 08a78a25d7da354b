"""Files: reads whose damage is named by its place, and writes that outlast a power failure.

Whatever is read from a file or a wire and parsed comes through here, so that a name that no system
has, nested JSON, a number of 10,000 digits and half a character are errors of pcg's like others.

What pcg saves has checksums: `seal` writes SHA256SUMS into a folder that is complete, in the format
of sha256sum(1), and `check_sums` refuses files that are not the saved ones. While a file of a
sealed folder is replaced, it has two lines there, of which either may hold.
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
"""The file of a folder's checksums."""
_SUM = re.compile(r"([0-9a-f]{64}) [ *](.+)")
_MOST_SUMS_BYTES = 2**20
_LONGEST_SHOWN = 300
"""Characters of a path in a message."""
_KINDS = {
    type(None): "null",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
}
"""The kinds of JSON values that are no objects."""
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
"""Linux' own numbers."""


def expanded(path: str | os.PathLike[str]) -> Path:
    """The path with `~` expanded, if the user has a home directory."""
    try:
        return Path(path).expanduser()
    except RuntimeError:  # no such user
        return Path(path)


def shown_path(path: Path) -> str:
    """A path for a message: cut, with escapes for unprintable characters."""
    text = str(path).encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 1]}…"


def is_file(path: Path) -> bool:
    """Return whether a readable entry is a file; never raises."""
    try:
        return path.is_file()
    except (OSError, ValueError):  # too long, in a closed directory, or no name at all
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
    """The content of a file; arguments and errors as in `read_json`."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):  # which may have no end
            raise error_type(f"{shown_path(path)} is a device and no file{fix}")
        return path.read_bytes()
    except OSError as error:
        raise error_type(f"{shown_path(path)} cannot be read: {error.strerror}{fix}") from error
    except ValueError as error:  # half a character or a zero byte in the name
        raise error_type(f"{shown_path(path)} cannot be read: it is no name of a file") from error


def read_text(path: Path, error_type: type[PcgError], fix: str = "") -> str:
    """The text in a UTF-8 file; arguments and errors as in `read_json`."""
    try:
        return read_bytes(path, error_type, fix).decode()
    except UnicodeDecodeError as error:
        raise error_type(f"{path} is damaged: byte {error.start} is not UTF-8{fix}") from error


def read_json(path: Path, error_type: type[PcgError], fix: str = "") -> dict[str, Any]:
    """The object in a JSON file.

    Args:
        error_type: the class of the errors.
        fix: the end of their messages, as "; download it again".
    Raises:
        error_type: the file cannot be read, is damaged, or holds something else.
    """
    return json_object(read_bytes(path, error_type, fix), str(path), error_type, fix)


def json_object(
    content: str | bytes, name: str, error_type: type[PcgError], fix: str = ""
) -> dict[str, Any]:
    """The object in the content of a JSON file; arguments and errors as in `read_json`."""
    value = json_value(content, name, error_type, fix)
    if not isinstance(value, dict):
        raise error_type(f"{name} holds {_KINDS[type(value)]}, not an object{fix}")
    return value


def json_value(content: str | bytes, name: str, error_type: type[PcgError], fix: str = "") -> Any:
    """The value in JSON text, of any kind; arguments and errors as in `read_json`."""
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
    """Convert any error of the block, which reads `what`, to `error_type`; PcgErrors pass."""
    try:
        yield
    except PcgError:
        raise
    except Exception as error:  # which, the content decides
        why = f"{type(error).__name__}: {shown(str(error), 200)[1:-1]}"
        raise error_type(f"{what} is damaged ({why}){fix}") from error


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's content in hexadecimal digits. OSError: it cannot be read."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def seal(folder: Path) -> None:
    """Write SHA256SUMS of all files of a folder, and wait until they are on the disk.

    Files are hashed in parallel, while the disk writes them. OSError: they cannot be read or
    written.
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
    """Write SHA256SUMS of a folder atomically, from digests by name. OSError: the write failed."""
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
    """The digests in a folder's SHA256SUMS by name; None for a folder without it.

    Raises:
        error_type: it cannot be read, or is damaged.
    """
    path = folder / SUMS
    if not is_there(path):
        return None
    with damage_of(shown_path(path), error_type, fix):
        if path.stat().st_size > _MOST_SUMS_BYTES or not path.is_file():
            raise ValueError(f"it is no file of at most {_MOST_SUMS_BYTES} bytes")
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
        names: the files that will be read; each needs a line there.
        fix: the end of messages, as in `read_json`.
        is_whole: check every file with a line, and refuse a folder without SHA256SUMS; by default
            such a folder passes, as other programs save no checksums.
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
                raise error_type(f"{shown_path(path)} is no regular file{fix}")
            size_bytes, digest = status.st_size, sha256_of(path)
        except FileNotFoundError as error:
            raise error_type(f"{shown_path(path)} is missing, which {SUMS} names{fix}") from error
        except OSError as error:
            raise error_type(f"{shown_path(path)} cannot be read: {error.strerror}{fix}") from error
        if digest not in sums[name]:
            raise error_type(
                f"{shown_path(path)} is damaged: the SHA-256 of its {size_bytes} bytes is "
                f"{digest[:12]}…, and {SUMS} has {min(sums[name])[:12]}…{fix}"
            )


@contextlib.contextmanager
def verified(check: Callable[[], None]) -> Iterator[None]:
    """Run a check behind the block; if the block fails, an error of damage replaces its error.

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
    """Remove files of a folder, and their lines of its SHA256SUMS. OSError: one stays."""
    for name in names:
        (folder / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError, PcgError):  # on a full disk the lines stay; nobody reads them
        sums = read_sums(folder, PcgError)
        if sums is not None and not sums.keys().isdisjoint(names):
            write_sums(folder, {name: sums[name] for name in sums if name not in names})


def cache_folder(name: str) -> Path:
    """The user's cache folder of a name, below `XDG_CACHE_HOME` if that is set."""
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
    """Refuse a directory, existing or not, in which nothing can be created; it stays unchanged.

    Args:
        what: the content to save there, for the error.
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


def exchange(first: Path, other: Path) -> bool:
    """Swap two paths of a file system atomically.

    Returns:
        False if the system or the file system cannot; nothing has changed then.
    Raises:
        OSError: they cannot be renamed.
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


def sync(path: Path) -> None:
    """Wait until a file's content is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(file: Path, text: str) -> None:
    """Write a text in UTF-8, and wait until it is on the disk. OSError: it cannot be written."""
    file.write_text(text, encoding="utf-8")
    sync(file)


def sync_names(directory: Path) -> None:
    """Make renames in a directory survive a power failure; some file systems cannot."""
    with contextlib.suppress(OSError):
        sync(directory)
