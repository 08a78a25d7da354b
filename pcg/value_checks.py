"""Checks of a request's values: their types, their ranges, and the most there may be of them."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence, Sized

from pcg.errors import GenerationError, PcgError
from pcg.units import shown


def require_number(
    name: str, value: object, low: float, high: float, open_low: bool = False
) -> None:
    """Refuse a value that is not a finite number in [low, high], or (low, high] with `open_low`."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        above = low < value if open_low else low <= value
        # The bounds come before `isfinite`, for which an int may be too large.
        if above and value <= min(high, sys.float_info.max) and math.isfinite(value):
            return
    interval = f"{'(' if open_low else '['}{low:g}, {high:g}{')' if math.isinf(high) else ']'}"
    raise GenerationError(f"{name}={shown(value)}; use a finite number in {interval}")


def require_int(
    name: str, value: object, low: int, high: int | None = None, hint: str = ""
) -> None:
    """Refuse a value that is not an int from `low` to `high`."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if is_int and value >= low and (high is None or value <= high):  # type: ignore[operator]
        return
    most = "" if high is None else f" and at most {shown(high)}"
    raise GenerationError(f"{name}={shown(value)}; use an int of at least {low}{most}{hint}")


def require_bool(name: str, value: object) -> None:
    """Refuse a value that is neither True nor False."""
    if not isinstance(value, bool):
        raise GenerationError(f"{name}={shown(value)}; use True or False")


def require_texts(name: str, values: object, most: int, longest: int) -> None:
    """Refuse what is not a tuple of at most `most` texts, of 1 to `longest` characters each."""
    if not isinstance(values, tuple) or not all(isinstance(s, str) and s for s in values):
        raise GenerationError(
            f"{name}={shown(values)}; use a tuple of strings that are not empty, as in ('\\n\\n',)"
        )
    require_at_most(name, values, most, "strings")
    for text in values:
        require_at_most(f"a string of {name}", text, longest, "characters")


def require_token_ids(name: str, values: object, most: int) -> None:
    """Refuse what is not a tuple of at most `most` token ids."""
    if not isinstance(values, tuple):
        raise GenerationError(f"{name}={shown(values)}; use a tuple of ints")
    require_at_most(name, values, most, "ids")
    if not all(type(token) is int and token >= 0 for token in values):
        for token in values:
            require_int(f"a token of {name}", token, 0)


def require_unicode(name: str, text: str) -> None:
    """Refuse a text that UTF-8 cannot hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise GenerationError(
            f"{name} has half of a surrogate pair at character {error.start}, which is no text"
        ) from error


def require_at_most(name: str, values: Sized, most: int, what: str) -> None:
    """Refuse more values than `most`."""
    if len(values) > most:
        raise GenerationError(f"{name} has {len(values):,} {what}; the limit is {most:,}")


def check_padding(
    ids: Sequence[int], place: str, padding: int | None, error: type[PcgError]
) -> None:
    """Raise an error of a class if tokens contain the padding token; `place` is their name."""
    if padding is not None and padding in ids:
        raise error(
            f"{place} has the padding token {padding}, to which this model gives no position; "
            "leave it out"
        )
