"""Damage of files as disks and people do it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

KINDS = ("flip", "cut", "empty", "gone")


def damage(path: Path, how: str, place: int) -> None:
    """Flip a bit of a file, cut it behind so many bytes, empty it, or remove it."""
    if how == "gone":
        path.unlink()
        return
    content = bytearray(path.read_bytes())
    if how == "flip":
        content[place // 8] ^= 1 << place % 8
    else:
        del content[place if how == "cut" else 0 :]
    path.unlink()  # a file of other links keeps its content
    path.write_bytes(content)


def damages(folder: Path, files: list[str], seed: int) -> Iterator[tuple[str, str, int]]:
    """Each file of a folder with each kind of damage, at a random place."""
    places = random.Random(seed)
    for file in files:
        size_bytes = (folder / file).stat().st_size
        for how in KINDS if size_bytes else ("gone",):
            yield file, how, places.randrange(8 * size_bytes if how == "flip" else size_bytes or 1)
