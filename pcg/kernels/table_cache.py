"""Caches of tables on a device, which last as long as a graph that was recorded with them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, wraps
from typing import TypeVar, cast

Make = TypeVar("Make", bound=Callable[..., object])
_MOST = 256

_KEPT: ContextVar[list[object] | None] = ContextVar("kept tables", default=None)


def table_cache(make: Make) -> Make:
    """Cache what a function makes of its arguments: the tables that were used last."""
    cached = lru_cache(maxsize=_MOST)(make)

    @wraps(cached)
    def table(*args: Hashable) -> object:
        found = cached(*args)
        kept = _KEPT.get()
        if kept is not None:
            kept.append(found)
        return found

    return cast(Make, table)


@contextmanager
def kept_tables() -> Iterator[list[object]]:
    """Note the tables that are used: whoever records their addresses keeps them."""
    kept: list[object] = []
    token = _KEPT.set(kept)
    try:
        yield kept
    finally:
        _KEPT.reset(token)
