"""Spread a memory budget over the layers: which plan of its frontier each layer takes.

Each layer has the lower convex hull of its (saved bytes, cost of recomputing). Steps along the
hulls, from "no product recomputed" on, are taken in the order of bytes spared per cost, over all
layers; so after every step no other mix of hull vertices saves fewer bytes at as little cost. Among
equal layers the first take theirs first: backward reaches them last, when the others' saved values
are gone and there is room for what is recomputed.

What layers share counts once for all layers that read it in backward, so a step along the hulls may
add bytes; only mixes of fewer bytes than all before them are taken.

Costs in seconds count what "no product recomputed" does not, so that a hull may begin with more
bytes than that. Where that is within a budget it is taken, and the hull's steps where it is not.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise

from pcg.options import MemoryBudget
from pcg.passes.memory.save_problem import Choice

LayerFrontiers = Sequence[Sequence[Choice]]
Mix = tuple[int, ...]
"""The index of each layer's choice on its frontier."""
SharedBytes = Mapping[str, int]
"""Bytes of each value that layers share and that some choices read."""


def spread(
    frontiers: LayerFrontiers, budget: MemoryBudget, outside_bytes: int, shared: SharedBytes
) -> Mix | None:
    """The mix of the least cost that is within a budget; None for none.

    `outside_bytes` are saved outside the layers, whatever they do.
    """
    steps = list(_sized_mixes(frontiers, shared))
    (most, _), (least, _) = steps[0], steps[-1]
    if budget.share is not None:
        limit = least + Fraction(budget.share) * (most - least)
    else:
        assert budget.size_bytes is not None
        limit = Fraction(budget.size_bytes - outside_bytes)
    return next((mix for size, mix in steps if size <= limit), None)


def mixes(frontiers: LayerFrontiers, shared: SharedBytes) -> Iterator[Mix]:
    """Every mix on the way from no product recomputed to the fewest bytes, one layer's step each.

    Each saves fewer bytes than the one before, at the best rate of bytes for cost.
    """
    return (mix for _, mix in _sized_mixes(frontiers, shared))


def _sized_mixes(frontiers: LayerFrontiers, shared: SharedBytes) -> Iterator[tuple[int, Mix]]:
    """Every mix on the way, behind the bytes of all its layers and of what they share."""
    mix = [0] * len(frontiers)
    least = mixed(frontiers, mix, shared).size_bytes
    yield least, tuple(mix)
    for layer, frontier in enumerate(frontiers):
        mix[layer] = _start(frontier)
    size = sum(choice.size_bytes for choice in _chosen(frontiers, mix))
    readers = Counter(name for choice in _chosen(frontiers, mix) for name in choice.shared)
    for _, layer in heapq.merge(*(_steps(one, layer) for layer, one in enumerate(frontiers))):
        now, then = frontiers[layer][mix[layer] :][:2]
        mix[layer] += 1
        size += then.size_bytes - now.size_bytes
        readers.update(then.shared)
        readers.subtract(now.shared)
        held = size + sum(shared.get(name, 0) for name, count in readers.items() if count)
        if held < least:
            least = held
            yield held, tuple(mix)


def _start(frontier: Sequence[Choice]) -> int:
    """The place where a frontier's hull begins: the first choice, or one of more bytes behind."""
    return int(len(frontier) > 1 and frontier[1].size_bytes >= frontier[0].size_bytes)


def _steps(frontier: Sequence[Choice], layer: int) -> Iterator[tuple[Fraction, int]]:
    """The price of each step of a layer, in cost a byte."""
    for now, then in pairwise(frontier[_start(frontier) :]):
        yield Fraction(then.cost - now.cost, now.size_bytes - then.size_bytes), layer


def mixed(frontiers: LayerFrontiers, mix: Sequence[int], shared: SharedBytes) -> Choice:
    """Bytes, operations and cost of all layers together, and what they share."""
    choices = _chosen(frontiers, mix)
    read = tuple(dict.fromkeys(name for choice in choices for name in choice.shared))
    size = sum(c.size_bytes for c in choices) + sum(shared.get(name, 0) for name in read)
    cost = sum(c.cost for c in choices)
    return Choice((), (), size, sum(c.flops for c in choices), cost, read)


def _chosen(frontiers: LayerFrontiers, mix: Sequence[int]) -> list[Choice]:
    return [frontier[i] for frontier, i in zip(frontiers, mix, strict=True)]
