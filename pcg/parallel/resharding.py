"""The cheapest reshards of a value, from the layouts that it has to any other.

    - → =    0 forward, an all-reduce backward          + → -    an all-reduce forward, 0 backward
    - → |d   0 forward, an all-gather backward          |d → -   an all-gather forward, 0 backward
    = → |d   0 both ways                                |d → +   0 both ways

    + → |d   a reduce-scatter, then an all-gather       |d → =   an all-gather, a reduce-scatter

The last two are of tokens, whose shards ranks hold where that is asked for (sequence parallelism);
a copy that was gathered so is gathered again in the backward, one all-gather more, where backward
reads it or a shard that was taken of it. Where gradients flow back to shards of tokens, these are
not combined: the whole would be saved for backward, which is what they are to spare.

Values are also brought by paths of these: - → + is - → |d → +, and = → - is = → |d → -, of the
cheapest dim.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import cache

from pcg.ir.layouts import PRE_REDUCE, REPLICATED, WHOLE, Layout, partitioned, token_part
from pcg.ir.types import RANK, State, TensorType
from pcg.parallel.costs.layer_costs import LayerCosts
from pcg.parallel.parallel_plan import SAVED_COPY, Reshard, is_saved, saved

Path = tuple[float, tuple[Reshard, ...]]
"""A path's cost, and its reshards in order."""


class ReshardPaths:
    """Cheapest paths between layouts, found once each.

    `shards_tokens` is True if ranks may hold shards of the tokens.
    """

    def __init__(self, degree: int, costs: LayerCosts, shards_tokens: bool) -> None:
        self.degree = degree
        self.costs = costs
        self.shards_tokens = shards_tokens
        self._free: frozenset[tuple[str, str]] = frozenset()
        self._parts: dict[TensorType, tuple[Layout, ...]] = {}
        self._known: dict[object, Path | None] = {}

    def where_free(self, free: frozenset[tuple[str, str]]) -> ReshardPaths:
        """The paths where some messages, by direction and kind, cost nothing to start."""
        other = copy.copy(self)
        other._free, other._known = free, {}
        return other

    # ----------------------------------------------------------------------------------- layouts

    def fits(self, type_: TensorType, layout: Layout) -> bool:
        """Return whether ranks can hold a tensor so: in equal parts of a number or an open rank.

        Or in shards of the tokens, where that is asked for.
        """
        if not layout.dim:
            return True
        if -layout.dim > len(type_.dims):
            return False
        if layout == token_part(type_):
            return self.shards_tokens
        size = type_.shape[layout.dim]
        return (isinstance(size, int) or size == RANK) and layout.fits(type_, self.degree)

    def parts(self, type_: TensorType) -> tuple[Layout, ...]:
        """The partitioned layouts that ranks can hold a tensor in."""
        if type_ not in self._parts:
            every = map(partitioned, range(-len(type_.dims), 0))
            self._parts[type_] = tuple(part for part in every if self.fits(type_, part))
        return self._parts[type_]

    def is_marked(self, type_: TensorType, layout: Layout) -> bool:
        """True if a mark says that backward has it; wholes and shards of tokens it always has."""
        always = (WHOLE, token_part(type_))
        return self.shards_tokens and type_.is_token_wise and layout not in always

    def made(self, type_: TensorType, layout: Layout) -> frozenset[Layout]:
        """The layouts of a value that a node makes; what was not gathered is saved."""
        return frozenset([layout, saved(layout)] if self.is_marked(type_, layout) else [layout])

    def after(
        self, type_: TensorType, have: frozenset[Layout], reshards: Iterable[Reshard]
    ) -> frozenset[Layout]:
        """The layouts of a value after some reshards."""
        for one in reshards:
            is_had = not self.is_marked(type_, one.before) or saved(one.before) in have
            if is_had and one.op != "gather" and not is_saved(one.after):
                have |= self.made(type_, one.after)
            have |= {one.after}
        return have

    # ------------------------------------------------------------------------------------- paths

    def path(
        self, type_: TensorType, is_active: bool, have: frozenset[Layout], wanted: Layout
    ) -> Path | None:
        """The cheapest path to a layout; None where there is none."""
        key = (type_, is_active, have, wanted)
        if key not in self._known:
            self._known[key] = self.cheapest(type_, is_active, have).get(wanted)
        return self._known[key]

    def cheapest(
        self, type_: TensorType, is_active: bool, have: Iterable[Layout]
    ) -> dict[Layout, Path]:
        """The cheapest path to every layout of a value that is had in some.

        `is_active` is True if a gradient flows back to the value.
        """
        best: dict[Layout, Path] = {}
        best.update(dict.fromkeys(sorted(have, key=str), (0.0, ())))
        changed = list(best)
        tokens = token_part(type_) if self.shards_tokens and type_.is_token_wise else None
        while changed:
            layout = changed.pop(0)
            cost, path = best[layout]
            for reshard in reshards_from(layout, self.parts(type_), tokens):
                if reshard.op == "combine" and is_active and reshard.is_of_tokens(type_):
                    continue
                total = cost + self._cost(type_, is_active, reshard)
                known = best.get(reshard.after)
                if known is None or (total, len(path) + 1) < (known[0], len(known[1])):
                    best[reshard.after] = (total, (*path, reshard))
                    changed.append(reshard.after)
        return best

    def _cost(self, type_: TensorType, is_active: bool, reshard: Reshard) -> float:
        cost = self.send(reshard, type_, is_active)
        if reshard.op == "place" or (reshard.op == "take" and is_active):
            cost += self.costs.place(type_, reshard.dim)
        return cost

    def send(self, reshard: Reshard, type_: TensorType, is_active: bool) -> float:
        """The cost of a reshard's messages, forward and backward."""
        cost = 0.0
        message = reshard.message(type_, self.degree)
        may_coalesce = not reshard.is_of_tokens(type_)
        for way, kind in (("forward", reshard.forward), ("backward", reshard.backward)):
            if kind and (way == "forward" or is_active):
                cost += self.costs.send(kind, message)
                is_free = may_coalesce and (way, kind) in self._free
                cost -= self.costs.send(kind) if is_free else 0.0
        return cost


@cache
def reshards_from(
    layout: Layout, parts: tuple[Layout, ...], tokens: Layout | None = None
) -> tuple[Reshard, ...]:
    """The reshards from a layout.

    A tensor can be held in `parts`; `tokens` is the one of these that shards its tokens, where
    ranks may hold such.
    """
    found: list[tuple[str, Layout]]
    if layout == SAVED_COPY:
        found = [("recompute", saved(part)) for part in parts if part != tokens]
    elif is_saved(layout):
        found = [("recompute", saved(PRE_REDUCE))] if layout.state is State.PARTITIONED else []
    elif layout == WHOLE:
        found = [("replicate", REPLICATED), *(("partition", part) for part in parts)]
    elif layout == REPLICATED:
        found = [("take", part) for part in parts]
    elif layout == PRE_REDUCE:
        found = [("reduce", WHOLE)]
        if tokens is not None:
            found.append(("scatter", tokens))
    else:
        found = [("combine", WHOLE), ("place", PRE_REDUCE)]
        if layout == tokens:
            found += [("gather", REPLICATED), ("regather", SAVED_COPY)]
    return tuple(Reshard(op, layout, after) for op, after in found)
