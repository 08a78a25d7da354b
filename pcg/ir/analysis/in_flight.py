"""Collectives in flight: they go on while other nodes run.

    s = all_reduce.begin(x)      begins where the node stands
    y = linear(z, W)             runs meanwhile
    s = s()                      is waited for right before its first reader, or the end
    t = neg(s)

All ranks run one program, so all begin, and wait for, the same collectives in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pcg.ir.graph import Node
from pcg.ir.operators import operator
from pcg.ir.operators.collectives import Collective


class Reader(Protocol):
    """A node, or a launch of several."""

    @property
    def inputs(self) -> tuple[str, ...]: ...


def collective_of(item: Reader) -> Collective | None:
    """The operator of a node that communicates; None for other nodes."""
    if not isinstance(item, Node):
        return None
    entry = operator(item.op)
    return entry if isinstance(entry, Collective) and entry.rounds else None


def waits(items: Sequence[Reader]) -> dict[int, int]:
    """The place where each collective that has work beside it is waited for, by its own place.

    That is the place of the first item that reads its outputs; the end where none does.
    """
    found = {}
    for place, item in enumerate(items):
        if not isinstance(item, Node) or collective_of(item) is None:
            continue
        first = first_reader(items, place, item)
        if any(_is_work(other) for other in items[place + 1 : first]):
            found[place] = first
    return found


def first_reader(items: Sequence[Reader], place: int, node: Node) -> int:
    """The place of the first item behind a node that reads its outputs; the end where none does."""
    made = {value.name for value in node.outputs}
    later = range(place + 1, len(items))
    return next((i for i in later if not made.isdisjoint(items[i].inputs)), len(items))


def _is_work(item: Reader) -> bool:
    """Return whether a node computes: a view does not, and a collective takes the same links."""
    if not isinstance(item, Node):
        return True
    return not operator(item.op).is_view and collective_of(item) is None
