"""Collectives that go on while other work is done.

    s = all_reduce.begin(x)      begins where the node stands
    y = linear(z, W)             runs meanwhile
    s = s()                      is waited for right before the first that reads s, or the end
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
    """A node, or what runs several."""

    @property
    def inputs(self) -> tuple[str, ...]: ...


def collective_of(item: Reader) -> Collective | None:
    """The operator of a node that exchanges something; None of others."""
    if not isinstance(item, Node):
        return None
    entry = operator(item.op)
    return entry if isinstance(entry, Collective) and entry.rounds else None


def waits(items: Sequence[Reader]) -> dict[int, int]:
    """Where each collective that has something to run beside it is waited for, by its place.

    Args:
        items: nodes, and what runs several, in the order in which they run.
    Returns:
        The place of the first that reads what came; the end where none does.
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
    """The place of the first behind a node's that reads what it makes; the end where none does."""
    made = {value.name for value in node.outputs}
    later = range(place + 1, len(items))
    return next((i for i in later if not made.isdisjoint(items[i].inputs)), len(items))


def _is_work(item: Reader) -> bool:
    """Whether it computes: neither a view nor a collective, which would take the same links."""
    if not isinstance(item, Node):
        return True
    return not operator(item.op).is_view and collective_of(item) is None
