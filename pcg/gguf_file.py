"""The header of a GGUF file: its metadata, and the place of each tensor.

    "GGUF" · version u32 · number of tensors u64 · number of entries u64
    entry      name · type u32 · value; a text is its length u64 and UTF-8, an array its type u32,
               its length u64 and its values
    tensor     name · number of dims u32 · sizes u64, innermost first · type u32 · offset u64
    data       from the next multiple of general.alignment

Source: github.com/ggml-org/ggml, the format's specification, versions 2 and 3.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from pcg.errors import UnsupportedError, WeightsError
from pcg.files import check_no_lfs_pointer

SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32

_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
"""Codes of `struct` for the types of metadata."""
_TEXT, _ARRAY = 8, 9

_TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    30: ("BF16", 1, 2),
    2: ("q4_0", 32, 18),
    3: ("q4_1", 32, 20),
    8: ("q8_0", 32, 34),
    12: ("q4_k", 256, 144),
    14: ("q6_k", 256, 210),
}
"""Types of tensors that pcg reads: name, and weights and bytes of a block."""
_OTHER_TYPES = {
    6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 13: "Q5_K", 15: "Q8_K",
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M",
    34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of a file.

    Attributes:
        type: F32, F16 or BF16, or the name of a format of `pcg.formats.gguf`.
        shape: sizes, the innermost last.
        offset: of the first byte in the file.
    """

    type: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int

    @property
    def is_float(self) -> bool:
        return self.type.isupper()


@dataclass(frozen=True)
class GgufHeader:
    """The header of a file: metadata by key, and tensors by name."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def read_gguf(path: Path) -> GgufHeader:
    """Read the header of a GGUF file.

    Raises:
        WeightsError: the file cannot be read, is no GGUF file, or is not whole.
        UnsupportedError: a tensor is of a type that pcg does not read, or the file is a part of
            several; names them.
    """
    try:
        with path.open("rb") as stream:
            start = stream.read(len(_MAGIC))
            if start != _MAGIC:
                check_no_lfs_pointer(path, WeightsError)
                raise WeightsError(
                    f"{path} is no GGUF file: it starts with {start.hex() or 'nothing'}; copy or "
                    "download it again"
                )
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return _Reader(path, content).header()
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror}") from error
    except (struct.error, ValueError, LookupError, OverflowError) as error:
        raise WeightsError(
            f"{path} is damaged: its header ends early or has a value of no known type ({error}); "
            "copy or download it again"
        ) from error


class _Reader:
    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self._path = path
        self._content = content
        self._at = len(_MAGIC)

    def header(self) -> GgufHeader:
        version = self._number("I")
        if version not in _VERSIONS:
            raise UnsupportedError(
                f"{self._path} is of version {version} of GGUF, or of the other byte order; pcg "
                f"reads versions {' and '.join(map(str, _VERSIONS))}, little-endian"
            )
        tensors, entries = self._number("Q"), self._number("Q")
        metadata = {}
        for _ in range(entries):
            name = self._text()
            metadata[name] = self._value(self._number("I"))
        parts = metadata.get("split.count", 0)
        if parts > 1:
            raise UnsupportedError(
                f"{self._path} is one of {parts} parts of a model; join them with "
                "llama-gguf-split --merge"
            )
        infos = [self._tensor_info() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        start = -(-self._at // alignment) * alignment
        return GgufHeader(self._path, metadata, self._placed(infos, start))

    def _placed(
        self, infos: list[tuple[str, tuple[int, ...], int, int]], start: int
    ) -> dict[str, GgufTensor]:
        unread: dict[str, list[str]] = {}
        tensors = {}
        for name, shape, number, offset in infos:
            if number not in _TYPES:
                known = _OTHER_TYPES.get(number, f"type {number}")
                unread.setdefault(known, []).append(name)
                continue
            type_, weights, size = _TYPES[number]
            if shape[-1] % weights:
                raise WeightsError(
                    f"{self._path}: {name} is {list(shape)}, and {type_} has blocks of {weights}; "
                    "copy or download it again"
                )
            size_bytes = prod(shape) // weights * size
            if start + offset + size_bytes > len(self._content):
                raise WeightsError(
                    f"{self._path} is truncated: {name} ends at byte {start + offset + size_bytes} "
                    f"of {len(self._content)}; copy or download it again"
                )
            tensors[name] = GgufTensor(type_, shape, start + offset, size_bytes)
        if unread:
            those = ", ".join(f"{len(n)} as {kind} ({n[0]})" for kind, n in unread.items())
            readable = ", ".join(name for name, *_ in _TYPES.values())
            raise UnsupportedError(
                f"{self._path} stores {those}; pcg reads {readable}: give a file of those types, "
                "as llama-quantize writes with Q8_0, Q4_0, Q4_1 or Q4_K_M"
            )
        return tensors

    def _number(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._content, self._at)
        self._at += struct.calcsize(f"<{code}")
        return value

    def _text(self) -> str:
        length = self._number("Q")
        text = self._content[self._at : self._at + length]
        if len(text) < length:
            raise ValueError(f"a text of {length} bytes")
        self._at += length
        return text.decode()

    def _value(self, type_: int) -> Any:
        if type_ == _TEXT:
            return self._text()
        if type_ != _ARRAY:
            return self._number(_SCALARS[type_])
        inner, count = self._number("I"), self._number("Q")
        if inner in (_TEXT, _ARRAY):
            return [self._value(inner) for _ in range(count)]
        code = f"<{count}{_SCALARS[inner]}"
        values = list(struct.unpack_from(code, self._content, self._at))
        self._at += struct.calcsize(code)
        return values

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._text()
        sizes = [self._number("Q") for _ in range(self._number("I"))]
        return name, tuple(reversed(sizes)), self._number("I"), self._number("Q")
