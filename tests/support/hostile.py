"""Values, paths and documents that a stranger may send, for the doors through which they come."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

NESTED = "[" * 20_000
"""JSON in more brackets than any parser's stack has room for."""
DIGITS = "1" * 5_000
"""A number with more digits than Python reads."""
PATHS = ("a" * 5_000, "/".join(["b"] * 4_000), "half \ud800", "zero \0", "/dev/null")
"""Names that no file has, or no file of data."""


class Raw:
    """Text that stands in a document as it is, though no value prints so."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return f"Raw({self.text[:10]!r}…)"


VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 0.5, 2**31, 2**63, 10**400, 1e308, float("nan"), float("inf"), "", "x",
    "half \ud800", "zero \0", "a" * 5_000, "(a+)+$", "1", [], [None], ["x", 1], {},
    {"x": {}}, Raw(NESTED), Raw(DIGITS),
)  # fmt: skip

Keys = tuple[str | int, ...]


def places(value: Any, keys: Keys = ()) -> Iterator[Keys]:
    """The keys of everything in a document, but for itself."""
    if not isinstance(value, dict | list):
        return
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*keys, key)
        yield from places(item, (*keys, key))


def text_of(document: Any) -> str:
    """JSON, with raw texts as they are."""
    raw: list[str] = []

    def hold(value: object) -> str:
        assert isinstance(value, Raw)
        raw.append(value.text)
        return f"raw {len(raw) - 1}"

    text = json.dumps(document, default=hold)
    for index, each in enumerate(raw):
        text = text.replace(f'"raw {index}"', each)
    return text


@st.composite
def mangled(draw: st.DrawFn, document: Any) -> Any:
    """A document with one to three of its parts replaced, removed or added."""
    made = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        keys = draw(st.sampled_from([(), *places(made)]))
        value = draw(st.sampled_from(VALUES))
        if not keys:
            if isinstance(made, dict):
                made[draw(st.sampled_from(["x", "", "half \ud800"]))] = value
            continue
        holder = made
        for key in keys[:-1]:
            holder = holder[key]
        if draw(st.booleans()) or isinstance(holder, list):
            holder[keys[-1]] = value
        else:
            del holder[keys[-1]]
    return made


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """Bytes of which some are cut, changed or doubled."""
    at = draw(st.integers(0, len(content)))
    how = draw(st.sampled_from(["cut", "bits", "doubled", "start"]))
    if how == "cut":
        return content[:at]
    if how == "bits":
        return content[:at] + bytes([draw(st.integers(0, 255))]) + content[at + 1 :]
    if how == "doubled":
        return content[:at] + content[at // 2 :]
    return draw(st.binary(min_size=8, max_size=24)) + content[8:]
