"""Native libraries, compiled where they run.

A library is compiled once for each user and kind of machine, into the user's cache. Its file name
has the digest of all that it depends on: its source and headers, the flags, the compiler, and the
processor's features. It is compiled under another name and renamed, so that processes that start
together never load a part of it. The folder is the user's, and nobody else may write there.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import re
import shutil
import stat
import struct
import subprocess
import tempfile
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TypeAlias

from pcg.errors import UnsupportedError
from pcg.files import cache_folder

_LOG = logging.getLogger("pcg.kernels")
_COMPILERS = ("c++", "g++", "clang++")
_HEADERS = [Path(__file__).with_name(f"{name}.h") for name in ("vectors", "avx512")]
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-Wno-psabi", f"-I{_HEADERS[0].parent}")
_THREADS = ("-fopenmp",)
"""The compiler gets this flag, and the linker does not: OpenMP is the one that torch has loaded, so
that there is one pool of threads."""
_TIMEOUT_S = 120.0


def load(source: Path, *flags: str) -> ctypes.CDLL:
    """Load the library of a C++ file, which is compiled if the cache does not have it.

    Without OpenMP in this process it is compiled for a single thread.

    Args:
        flags: for the compiler, besides the usual ones.
    Raises:
        UnsupportedError: there is no compiler, it fails, or others can write to the cache.
    """
    compiler = _compiler()
    folder = _own_folder()
    try:
        return _library(source, folder, compiler, (*_FLAGS, *flags, *_THREADS))
    except UnsupportedError:
        return _library(source, folder, compiler, (*_FLAGS, *flags))


def load_optional(source: Path, purpose: str, *flags: str) -> ctypes.CDLL | None:
    """Load a library as `load` does; log that PyTorch replaces it where it cannot be compiled.

    Args:
        purpose: the computation, as the subject of the log's sentence.
    """
    try:
        return load(source, *flags)
    except UnsupportedError as error:
        _LOG.warning(
            "%s run by PyTorch, slower and as right, as the native kernel cannot be compiled: %s",
            purpose,
            error,
        )
        return None


class NativeFunction:
    """A function of a library; it takes a struct of 8-byte numbers, and returns nothing.

    Attributes:
        address: of its code.
    """

    __slots__ = ("_function", "address")

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self._function = library[name]
        self._function.argtypes, self._function.restype = (ctypes.c_void_p,), None
        self.address: int = ctypes.cast(self._function, ctypes.c_void_p).value or 0

    def __call__(self, *numbers: int, keeps: object = None) -> None:
        """Call the function.

        Args:
            numbers: the struct's fields: integers, or `bits_of` floats.
            keeps: has memory that the fields name and that no other owner keeps for later calls.
        """
        call = array("q", numbers)
        self._function(call.buffer_info()[0])
        if _LISTENER.hear is not None:
            _LISTENER.hear(self, call, keeps)


@cache
def bits_of(number: float) -> int:
    """Return an fp64 number as an integer of the same bits."""
    bits: int = struct.unpack("q", struct.pack("d", number))[0]
    return bits


Hear: TypeAlias = Callable[[NativeFunction, "array[int]", object], None]
"""Is told of a function, its struct, and what the call keeps."""


class _Listener(threading.local):
    hear: Hear | None = None


_LISTENER = _Listener()


@contextmanager
def hearing(hear: Hear) -> Iterator[None]:
    """Have a function told of this thread's native calls, after each, within a `with`."""
    _LISTENER.hear = hear
    try:
        yield
    finally:
        _LISTENER.hear = None


class NotRecordedError(Exception):
    """A function does what a replay of its native calls would not repeat."""


def check_unrecorded(reason: str) -> None:
    """Raise a NotRecordedError if this thread is recorded."""
    if _LISTENER.hear is not None:
        raise NotRecordedError(reason)


def _compiler() -> Path:
    """The compiler of the variable CXX, or the system's; an empty CXX means no compiler."""
    named = os.environ.get("CXX")
    names = _COMPILERS if named is None else (named,)
    path = next((path for name in names if name and (path := shutil.which(name))), None)
    if path is None:
        raise UnsupportedError(
            f"there is no C++ compiler {' or '.join(names) or '(CXX is empty)'}; install g++, or "
            "have CXX name one"
        )
    return Path(path).resolve()


def _own_folder() -> Path:
    folder = Path("~/.cache")
    try:
        folder = cache_folder("kernels")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = folder.resolve()
        status = folder.stat()
        # Anyone can replace the content of a folder that others may write without a sticky bit.
        modes = ((path, path.stat().st_mode) for path in folder.parents)
        above = [path for path, m in modes if m & stat.S_IWOTH and not m & stat.S_ISVTX]
    except (OSError, RuntimeError) as error:
        raise UnsupportedError(
            f"{folder} cannot be made: {error}; have XDG_CACHE_HOME name a folder of your own"
        ) from error
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or above:
        place = above[0] if above else folder
        raise UnsupportedError(
            f"others can write in {place}, and code is not run from there; have XDG_CACHE_HOME "
            "name a folder of your own"
        )
    return folder


def _library(source: Path, folder: Path, compiler: Path, flags: tuple[str, ...]) -> ctypes.CDLL:
    path = folder / f"{source.stem}-{_digest(source, compiler, flags)}.so"
    if path.exists():
        try:
            return ctypes.CDLL(str(path))
        except OSError:  # damaged, or of a system that is no more
            path.unlink(missing_ok=True)
    _compile(source, path, compiler, flags)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise UnsupportedError(f"{path} cannot be loaded: {error}") from error


def _digest(source: Path, compiler: Path, flags: tuple[str, ...]) -> str:
    version = compiler.stat()
    known = (flags, str(compiler), version.st_size, version.st_mtime_ns, platform.machine())
    content = repr((*known, processor())).encode() + source.read_bytes()
    headers = b"".join(path.read_bytes() for path in _HEADERS)
    return hashlib.sha256(content + headers).hexdigest()[:16]


def processor() -> str:
    """Return the features of this machine's processor, as the system names them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), "")


def _compile(source: Path, path: Path, compiler: Path, flags: tuple[str, ...]) -> None:
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".compiling-") as place:
            binary, library = Path(place, "kernel.o"), Path(place, path.name)
            _run(str(compiler), *flags, "-c", str(source), "-o", str(binary))
            _run(str(compiler), "-shared", str(binary), "-o", str(library))
            library.chmod(0o700)
            library.replace(path)
    except OSError as error:
        raise UnsupportedError(f"{path} cannot be written: {error}") from error


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise UnsupportedError(f"{command[0]} took more than {_TIMEOUT_S:g} s") from error
    except subprocess.CalledProcessError as error:
        lines = str(error.stderr).strip().splitlines()
        said = next((line for line in lines if "error" in line), lines[-1] if lines else "")
        if (refusal := re.search(r'#error "(.*)"', said)) is not None:  # of our own source
            raise UnsupportedError(refusal[1]) from error
        raise UnsupportedError(f"{command[0]} fails: {said[:300]}") from error
