"""The text that the examples train on: the running interpreter's own standard library.

A file is in the corpus when it is Python source that this interpreter can parse, and its text was
not seen under an earlier path. It is held out when

    sha256(SPLIT_SALT + path relative to the standard library) mod 1000 < HELD_OUT_PER_MILLE

The rule reads the path alone, so another patch release of Python, or another machine, puts the same
file on the same side.
"""

import ast
import hashlib
import os
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_PER_MILLE = 30
# Of the salts pcg-0, pcg-1, ... the first that, on Python 3.11, also holds out about 3 % of the
# bytes (2.7 to 3.5), has no file above 12 % of the held-out text, and holds out at least 30 kB of
# asyncio.
SPLIT_SALT = "pcg-8:"

SKIPPED_DIRECTORIES = frozenset({"__pycache__", "site-packages", "dist-packages"})
# lib2to3's fixtures are code of other Python versions; the other two name this machine's paths.
SKIPPED_PREFIXES = ("lib2to3/tests/data/", "config-", "_sysconfigdata")
# Generated tables: hundreds of near-equal lines teach nothing after the first few.
TABLE_PREFIXES = ("encodings/", "pydoc_data/")
TABLE_CHARS = 2_000


@dataclass(frozen=True)
class SourceFile:
    """One standard library module: its path relative to the library, and its decoded text."""

    path: str
    text: str

    @property
    def held_out(self) -> bool:
        """True if the split rule keeps this file out of training."""
        digest = hashlib.sha256((SPLIT_SALT + self.path).encode()).digest()
        return int.from_bytes(digest[:8], "big") % 1000 < HELD_OUT_PER_MILLE


def read_stdlib(root: Path | None = None) -> list[SourceFile]:
    """Read every usable source file of the standard library, in path order.

    Args:
        root: library folder; the running interpreter's own when None.
    Returns:
        The files, without duplicates of equal text.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    files: list[SourceFile] = []
    seen: set[str] = set()
    for path in sorted(_python_paths(root)):
        text = _read_source(root / path)
        if text is None or text in seen:
            continue
        seen.add(text)
        if path.startswith(TABLE_PREFIXES):
            text = text[:TABLE_CHARS].rpartition("\n")[0] + "\n"
        files.append(SourceFile(path, text))
    return files


def _python_paths(root: Path) -> Iterator[str]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_DIRECTORIES]
        for name in names:
            path = (Path(folder) / name).relative_to(root).as_posix()
            if name.endswith(".py") and not path.startswith(SKIPPED_PREFIXES):
                yield path


def _read_source(path: Path) -> str | None:
    """Decode by the file's own coding line; None for empty files and files that do not parse."""
    try:
        with tokenize.open(path) as stream:
            text = stream.read()
        with warnings.catch_warnings():
            # The test suite has invalid escapes on purpose; they only warn.
            warnings.simplefilter("ignore")
            ast.parse(text)
    except (SyntaxError, UnicodeDecodeError, ValueError, RecursionError, MemoryError):
        return None
    return text if text.strip() else None
