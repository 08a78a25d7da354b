"""The chunks of several streams, those of the first request first."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice

from pcg.runtime.requests.request import Chunk, Request
from pcg.runtime.requests.stream import Stream


def in_order(
    requests: Sequence[Request], submit: Callable[[Request], Stream], most: int
) -> Iterator[Chunk]:
    """Submit requests, so many of them now; return their chunks, those of the first one first."""
    begun = deque(submit(request) for request in requests[:most])
    return _in_order(begun, iter(requests[most:]), submit)


def _in_order(
    begun: deque[Stream], left: Iterator[Request], submit: Callable[[Request], Stream]
) -> Iterator[Chunk]:
    try:
        for index in count():
            if not begun:
                return
            for chunk in begun.popleft():
                yield dataclasses.replace(chunk, index=index)
            begun.extend(submit(request) for request in islice(left, 1))
    finally:  # an error of one, or a reader that stops, ends the others
        for stream in begun:
            stream.cancel()
