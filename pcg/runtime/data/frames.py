"""Frames: examples as bytes, from the process that tokenizes to the one that trains.

    frame   one line of JSON, and the bytes that it announces
    batch   {"places": […], "lengths": […]}, then the ids and the labels of all examples, int64
    end     {"format": …, "truncated": …, "dropped": …}
    error   {"error": name of a class of `pcg.errors`, "message": …}

Nothing here is unpickled: a chat template is a stranger's program, and runs in that other process.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from typing import IO, Any

from pcg.runtime.data.example import Example

Header = dict[str, Any]
Placed = tuple[Example, str]
"""An example and its place."""


def write_frame(stream: IO[bytes], header: Header, *parts: bytes) -> None:
    """Write a frame."""
    stream.write(json.dumps(header).encode() + b"\n")
    for part in parts:
        stream.write(part)
    stream.flush()


def write_batch(stream: IO[bytes], placed: Sequence[Placed]) -> None:
    """Write a frame of examples."""
    ids, labels = array("q"), array("q")
    for example, _ in placed:
        ids.extend(example.ids)
        labels.extend(example.labels)
    lengths = [len(example.ids) for example, _ in placed]
    header = {"places": [place for _, place in placed], "lengths": lengths}
    write_frame(stream, header, ids.tobytes(), labels.tobytes())


def read_header(stream: IO[bytes]) -> Header | None:
    """Read the JSON of the next frame; None where the stream ends."""
    line = stream.readline()
    if not line.endswith(b"\n"):
        return None
    header: Header = json.loads(line)
    return header


def read_batch(stream: IO[bytes], header: Header) -> list[Placed]:
    """Read the examples that a header announces.

    Raises:
        EOFError: the stream ends before them.
    """
    lengths: list[int] = header["lengths"]
    ids, labels = _read_ints(stream, sum(lengths)), _read_ints(stream, sum(lengths))
    placed, start = [], 0
    for length, place in zip(lengths, header["places"], strict=True):
        end = start + length
        placed.append((Example(ids[start:end], labels[start:end]), place))
        start = end
    return placed


def _read_ints(stream: IO[bytes], count: int) -> array[int]:
    ints = array("q")
    ints.fromfile(stream, count)
    return ints
