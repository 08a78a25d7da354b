"""Paths of transitions: the planner's against all that there are."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from pcg.ir.layouts import PRE_REDUCE, REPLICATED, ROUTED, WHOLE, Layout, partitioned
from pcg.ir.operators import OPERATORS
from pcg.ir.operators.collectives import Transition
from pcg.ir.types import TOKENS, TensorType, tensor
from pcg.parallel.costs.layer_costs import ByteCosts
from pcg.parallel.parallel_plan import SAVED_COPY, is_saved, saved
from pcg.parallel.planner import ReshardPaths, Routing

DEGREE = 2
TYPES = (
    tensor("f32", TOKENS, 8),
    tensor("f32", TOKENS, 4, 6),
    tensor("f32", 6, 8),
    tensor("f32", 8, 2, 4),
    tensor("f32", 3, 8),
    tensor("f32", 5),
)
SENDS = {
    "reduce": ("all_reduce", ""),
    "combine": ("all_gather", ""),
    "replicate": ("", "all_reduce"),
    "partition": ("", "all_gather"),
    "place": ("", ""),
    "take": ("", ""),
    "scatter": ("reduce_scatter", "all_gather"),
    "gather": ("all_gather", "reduce_scatter"),
    "route": ("", ""),
    "dispatch": ("all_to_all", "all_to_all"),
    "collect": ("all_to_all", "all_to_all"),
}
"""The collective of each transition, forward and backward (FlexLLM §5.1; of tokens Korthikanti et
al. 2022, §4.2.2)."""
OF_TOKENS = ("collect", "dispatch", "gather", "scatter")
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
CHOICES = 4


class Dice(ByteCosts):
    """Costs that are thrown once."""

    def __init__(self, seed: int) -> None:
        super().__init__(DEGREE)
        dice = random.Random(seed)
        self.costs = {kind: dice.choice((0, 1, 2, 5)) for kind in KINDS}
        self.placing = {dim: dice.choice((0, 1, 3)) for dim in range(-3, 0)}

    def send(self, kind: str, type_: TensorType) -> float:
        return self.costs[kind]

    def place(self, type_: TensorType, dim: int) -> float:
        return self.placing[dim]

    def step(self, op: str, dim: int, is_active: bool) -> float:
        forward, backward = SENDS[op]
        cost = self.costs.get(forward, 0)
        cost += self.costs.get(backward, 0) if is_active else 0
        # Of a place the forward writes among zeros, of a take the backward.
        return cost + (self.placing[dim] if op == "place" or (op == "take" and is_active) else 0)


def layouts_of(type_: TensorType, of_tokens: bool) -> list[Layout]:
    sizes = list(enumerate(type_.shape))
    parts = [
        partitioned(at - len(sizes))
        for at, n in sizes
        if (n % DEGREE == 0 if isinstance(n, int) else of_tokens)
    ]
    rows = [ROUTED] * type_.is_token_wise
    return [WHOLE, REPLICATED, PRE_REDUCE, *rows, *parts]


def edges(
    layouts: list[Layout], tokens: int, is_active: bool
) -> Iterator[tuple[str, int, Layout, Layout]]:
    """Transitions; `tokens` is the dim that tokens are parted along, 0 for none."""
    for entry in OPERATORS.values():
        if isinstance(entry, Transition):
            for dim in {layout.dim for layout in layouts}:
                is_of_tokens = bool(tokens) and dim == tokens
                if entry.name in OF_TOKENS and not is_of_tokens:
                    continue
                if entry.name == "collect" and tokens != -3:
                    continue  # rows of tokens, and not of their choices
                if entry.name == "combine" and is_of_tokens and is_active:
                    continue  # backward would keep the whole
                before, after = entry.layouts({"dim": dim} if dim else {})
                if (
                    before in layouts
                    and after in layouts
                    and bool(dim) == bool(before.dim or after.dim)
                ):
                    yield entry.name, dim, before, after


@pytest.mark.parametrize("shards_tokens", [False, True])
@pytest.mark.parametrize("type_", TYPES, ids=str)
@pytest.mark.parametrize("is_active", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_the_cheapest_path_is_the_cheapest_of_all(
    type_: TensorType, is_active: bool, seed: int, shards_tokens: bool
) -> None:
    costs = Dice(seed)
    paths = ReshardPaths(DEGREE, costs, shards_tokens, Routing("indices", 1, CHOICES))
    layouts = layouts_of(type_, shards_tokens)
    tokens = -len(type_.dims) if shards_tokens and type_.is_token_wise else 0
    steps = list(edges(layouts, tokens, is_active))

    def walk(at: Layout, cost: float, seen: frozenset[Layout]) -> Iterator[tuple[Layout, float]]:
        yield at, cost
        for op, dim, before, after in steps:
            if before == at and after not in seen:
                more = cost + costs.step(op, dim, is_active)
                yield from walk(after, more, seen | {after})

    has = [*itertools.combinations(layouts, 1), *itertools.combinations(layouts, 2)]
    for have in has:
        if have == (ROUTED,) and tokens != -3:
            continue  # no transition leads from there
        least: dict[Layout, float] = {}
        for layout, cost in (end for start in have for end in walk(start, 0, frozenset({start}))):
            least[layout] = min(cost, least.get(layout, cost))
        found = paths.cheapest(type_, is_active, have)
        marks = {layout for layout in found if is_saved(layout)}
        parts = {saved(at) for at in layouts if at.dim and at.dim != tokens}
        parts |= {saved(ROUTED)} & {*marks}
        assert marks == (
            {SAVED_COPY, *parts, *([saved(PRE_REDUCE)] * bool(parts))} if tokens else set()
        )
        assert len({found.pop(mark)[0] for mark in marks}) <= 1  # what it takes to gather again
        assert {layout: cost for layout, (cost, _) in found.items()} == least
        for layout, (cost, path) in found.items():
            at = [*have, *(step.after for step in path)]
            assert all(step.before in at[: len(have) + i] for i, step in enumerate(path))
            assert (path[-1].after if path else layout) == layout
            assert sum(costs.step(step.op, step.dim, is_active) for step in path) == cost
        if len(layouts) > 4:
            assert set(found) == set(layouts)
