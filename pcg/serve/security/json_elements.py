"""The elements of a JSON text, which are counted in its bytes before objects are made of them.

Reading JSON holds the interpreter's lock from the first byte to the last, so no stream goes on
meanwhile. How long depends on the number of elements far more than on bytes: 4 MiB took 50 ms as
two million numbers, and two seconds as a million lists, which the garbage collector goes through
again and again; as one text they take 3 ms. numpy counts without the lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from pcg.serve.errors import ApiError

MOST_CONTAINERS = 2**16
"""More than a body can have whose lists are within their bounds (`pcg.serve.openai`)."""
MOST_VALUES = 2**18
"""Read and validated in 20 ms; a model with a longer context has twice as many as its tokens."""
_MOST: Mapping[str, int] = {
    "lists and objects": MOST_CONTAINERS,
    "names": 2**16,
    "quotation marks": 2**18,
    "values": MOST_VALUES,
}
_PART = 2**17
"""Bytes that are looked at at once: numpy has the lock again between them."""
_QUOTE, _BACKSLASH = ord('"'), ord("\\")

Bytes = npt.NDArray[np.uint8]


def check_elements(body: bytes, most_values: int = MOST_VALUES) -> None:
    """Refuse a JSON text that has too many elements.

    Args:
        most_values: the most entries of lists and objects, if more than `MOST_VALUES`.
    Raises:
        ApiError: says of what there are too many, and how many there may be.
    """
    most = {**_MOST, "values": max(most_values, MOST_VALUES)}
    parts = [np.frombuffer(body[at : at + _PART], np.uint8) for at in range(0, len(body), _PART)]
    counted = (_counts(part, _count(part, '"')) for part in parts)
    if _excess(counted, most) is None:  # as nearly always
        return
    excess = _excess((_counts(*found) for found in _without_texts(parts)), most)
    if excess is not None:
        raise ApiError(
            400,
            f"The body has more than {most[excess]} {excess}; send fewer.",
            code="body_too_large",
        )


def _excess(parts: Iterable[Counter[str]], most: Mapping[str, int]) -> str | None:
    """Return what there is too much of in the parts together, None if nothing."""
    counts = sum(parts, Counter[str]())
    return next((name for name, bound in most.items() if counts[name] > bound), None)


def _counts(text: Bytes, quotes: int) -> Counter[str]:
    """Return at least as many elements as a text has, by the characters that each of them needs."""
    brackets, names, commas = (_count(text, one) for one in ("[{", ":", ","))
    found = (brackets, names, quotes, commas + brackets)
    return Counter(dict(zip(_MOST, found, strict=True)))


def _count(text: Bytes, characters: str) -> int:
    return sum(int(np.count_nonzero(text == ord(one))) for one in characters)


def _without_texts(parts: Sequence[Bytes]) -> Iterator[tuple[Bytes, int]]:
    """Yield what stands outside a JSON text's strings, and the number of their quotation marks."""
    run = is_inside = 0
    for text in parts:
        places = np.arange(len(text), dtype=np.int32)
        others = np.maximum.accumulate(np.where(text == _BACKSLASH, np.int32(-1), places))
        others[others < 0] = -1 - run  # the backslashes before this part, on which it goes on
        # How many backslashes stand before each character.
        runs = places - 1 - np.concatenate(([-1 - run], others[:-1]))
        run = len(text) - 1 - int(others[-1])
        # An odd number makes a quotation mark a part of its string.
        is_end = (text == _QUOTE) & (runs % 2 == 0)
        is_within = np.bitwise_xor.accumulate(is_end.astype(np.uint8)) ^ is_inside
        is_inside = int(is_within[-1])
        yield text[is_within == 0], int(np.count_nonzero(is_end))
