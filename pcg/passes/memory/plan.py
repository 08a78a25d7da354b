"""Memory plan of training: the saved values of each layer, within a budget over all layers.

**Spread.** Each layer has the lower convex hull of its (saved bytes, cost of recomputation). Steps
along the hulls, from "no product recomputed" on, are taken in the order of saved bytes per cost,
over all layers; so after every step, no other mix of hull vertices saves fewer bytes at an equal or
lower cost. Among equal layers, earlier layers step first: backward reaches them last, when the
other layers' saved values are freed and leave memory for recomputed values.

A value that layers share counts once for all layers that read it in backward, so a step along the
hulls may add bytes; only mixes of fewer bytes than all earlier mixes are taken. Costs in seconds
include operators other than products, so a hull may begin with more bytes than "no product
recomputed", which is chosen if it fits the budget.

**Segments** of layers share a saved input, for budgets below an input per layer.

    save x_i;   backward of layer i+k:   x_{i+1} = layer i(x_i), …, x_{i+k} = layer i+k-1(x_{i+k-1})

If every layer saves only its input, a layer with a recomputed input saves nothing. Each recomputed
input saves the same bytes and costs another forward of the previous layer, for any placement of the
segments. The length g of a segment changes the memory of backward: up to g - 1 recomputed inputs,
and L / g saved inputs. The longest segment is as short as possible, and at most sqrt(L), where both
are equal. Earlier layers share first, as their recomputed inputs are alive after the other layers'
saved inputs are freed.

Source: the square root is that of Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from math import isqrt

from pcg.errors import MemoryBudgetError
from pcg.ir.analysis.dataflow import graph_flops
from pcg.ir.analysis.storages import Storages
from pcg.ir.program.program import ModelGraph, TrainingGraph
from pcg.ir.program.saved_memory import outside_bytes
from pcg.ir.types import TOKENS
from pcg.options import MemoryBudget
from pcg.parallel.costs.cost_model import RankCosts
from pcg.passes.graphs.differentiate import LayerKind
from pcg.passes.memory.recompute import plan_layer
from pcg.passes.memory.save_problem import Choice, SaveProblem

# ------------------------------------------------------------------------------------------- budget


LayerFrontiers = Sequence[Sequence[Choice]]
Mix = tuple[int, ...]
"""The index of each layer's choice on its frontier."""
SharedBytes = Mapping[str, int]
"""Bytes of each value that layers share and that some choices read."""


def spread(
    frontiers: LayerFrontiers, budget: MemoryBudget, outside_bytes: int, shared: SharedBytes
) -> Mix | None:
    """Return the mix of the least cost within a budget, or None.

    `outside_bytes` are always saved outside the layers.
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
    """Return the mixes from no recomputed product to the fewest bytes, a layer's step each.

    Each mix saves fewer bytes than the mix before, at the best ratio of bytes to cost.
    """
    return (mix for _, mix in _sized_mixes(frontiers, shared))


def _sized_mixes(frontiers: LayerFrontiers, shared: SharedBytes) -> Iterator[tuple[int, Mix]]:
    """Yield every mix, with the bytes of all its layers and of shared values."""
    mix = [0] * len(frontiers)
    least = mixed(frontiers, mix, shared).size_bytes
    yield least, tuple(mix)
    for layer, frontier in enumerate(frontiers):
        mix[layer] = _start(frontier)
    size = sum(choice.size_bytes for choice in _chosen(frontiers, mix))
    readers = Counter(name for choice in _chosen(frontiers, mix) for name in choice.shared)
    for _, layer in heapq.merge(
        *(_steps(layer_choices, layer) for layer, layer_choices in enumerate(frontiers))
    ):
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
    """Return the start of a frontier's hull: the first choice, or a larger second choice."""
    return int(len(frontier) > 1 and frontier[1].size_bytes >= frontier[0].size_bytes)


def _steps(frontier: Sequence[Choice], layer: int) -> Iterator[tuple[Fraction, int]]:
    for now, then in pairwise(frontier[_start(frontier) :]):
        yield Fraction(then.cost - now.cost, now.size_bytes - then.size_bytes), layer


def mixed(frontiers: LayerFrontiers, mix: Sequence[int], shared: SharedBytes) -> Choice:
    """Return the bytes, operations and cost of all layers together, and their shared values."""
    choices = _chosen(frontiers, mix)
    read = tuple(dict.fromkeys(name for choice in choices for name in choice.shared))
    size = sum(c.size_bytes for c in choices) + sum(shared.get(name, 0) for name in read)
    cost = sum(c.cost for c in choices)
    return Choice((), (), size, sum(c.flops for c in choices), cost, read)


def _chosen(frontiers: LayerFrontiers, mix: Sequence[int]) -> list[Choice]:
    return [frontier[i] for frontier, i in zip(frontiers, mix, strict=True)]


# ----------------------------------------------------------------------------------------- segments


def restorable(
    model: ModelGraph, plans: Sequence[TrainingGraph], layers: Sequence[int]
) -> list[bool]:
    """Return for each layer whether the previous layer can recompute its input.

    Both layers must save their single carried input, and nothing else except shared values.
    `layers` has the index of each layer's plan.
    """
    alone = [_saves_its_input_alone(model, plan) for plan in plans]
    return [False, *(alone[before] and alone[layer] for before, layer in pairwise(layers))]


def shared_inputs(restorable: Sequence[bool], count: int) -> tuple[int, ...] | None:
    """Return the first `count` layers with recomputed inputs; None if fewer are possible."""
    for longest in range(1, max(isqrt(len(restorable)), 1) + 1):
        recomputed = _in_segments(restorable, longest)
        if len(recomputed) >= count:
            return tuple(recomputed[:count])
    return None


def most_shared(restorable: Sequence[bool]) -> tuple[int, ...]:
    """Return the layers with recomputed inputs, for the most recomputed inputs."""
    return tuple(_in_segments(restorable, max(isqrt(len(restorable)), 1)))


def _in_segments(restorable: Sequence[bool], longest: int) -> list[int]:
    recomputed, length = [], 1
    for layer, can_be in enumerate(restorable):
        length = length + 1 if can_be and length < longest else 1
        if length > 1:
            recomputed.append(layer)
    return recomputed


def _saves_its_input_alone(model: ModelGraph, plan: TrainingGraph) -> bool:
    block = model.blocks[plan.block]
    if plan.backward is None or len(block.outputs) != 1:
        return False
    storages = Storages.of(plan.forward)
    resident = {value.name for value in block.inputs[1:]}
    storages_saved = {storages[name] for name in plan.saved}
    storages_saved = {s for s in storages_saved if not s.is_parameter and s.name not in resident}
    return storages_saved == {storages[block.inputs[0].name]}


# --------------------------------------------------------------------------------------------- plan


@dataclass(frozen=True)
class MemoryPlan:
    """A plan of the values that a model's layers save and recompute.

    Attributes:
        plans: the distinct training graphs of layers.
        layers: the index of each layer's plan.
        choices: the choice of each plan.
        layer_flops: operations of each layer's matrix products and attention, forward.
        restored: layers whose input backward recomputes by the previous layer.
    """

    plans: tuple[TrainingGraph, ...]
    layers: tuple[int, ...]
    choices: tuple[Choice, ...]
    layer_flops: tuple[int, ...]
    restored: tuple[int, ...] = ()

    def map(self, change: Callable[[TrainingGraph], TrainingGraph]) -> MemoryPlan:
        return dataclasses.replace(self, plans=tuple(map(change, self.plans)))

    @property
    def recompute_flops_ratio(self) -> float:
        """Recomputed operations, as a share of the layers' forward."""
        again = sum(self.choices[index].flops for index in self.layers)
        again += sum(self.layer_flops[layer - 1] for layer in self.restored)
        return again / (sum(self.layer_flops) or 1)


@dataclass(frozen=True)
class Frontiers:
    """The layers' choices of saved and recomputed values, at a batch.

    Frontiers take many cuts and are computed when first read; a share of 1 needs a single cut per
    kind of layers.

    Attributes:
        layers: the index of each layer's kind.
        layer_flops: operations of each layer's matrix products and attention.
        outside_bytes: bytes that are always saved outside the layers.
        shared_bytes: bytes of other values that layers share; each counts if backward reads it.
        model: the model with bypass networks attached.
        batch: number of sequences of the step.
        seq: number of tokens of a sequence, on a rank.
        parts: ranks that share the tokens of a sequence.
        costs: the seconds of a rank's nodes; None to count operations.
    """

    kinds: tuple[LayerKind, ...]
    layers: tuple[int, ...]
    layer_flops: tuple[int, ...]
    outside_bytes: int
    shared_bytes: SharedBytes
    model: ModelGraph
    batch: int
    seq: int
    costs: RankCosts | None = None
    parts: int = 1

    @cached_property
    def of_kind(self) -> tuple[tuple[Choice, ...], ...]:
        return tuple(problem.frontier() for problem in self._problems)

    @cached_property
    def by_flops(self) -> tuple[tuple[Choice, ...], ...]:
        """The frontiers by operations; empty if the kinds' frontiers are by operations.

        As layers are indivisible, a mix of these may fit a budget at a lower cost.
        """
        if self.costs is None:
            return ()
        alone = (self._problem(kind, None).frontier() for kind in self.kinds)
        pairs = zip(self._problems, alone, strict=True)
        return tuple(problem.in_costs(choices) for problem, choices in pairs)

    @cached_property
    def firsts(self) -> tuple[Choice, ...]:
        return tuple(problem.first for problem in self._problems)

    @cached_property
    def _problems(self) -> tuple[SaveProblem, ...]:
        return tuple(self._problem(kind, self.costs) for kind in self.kinds)

    def _problem(self, kind: LayerKind, costs: RankCosts | None) -> SaveProblem:
        gradients = kind.gradients
        step = (self.batch, self.seq, costs, self.parts)
        return SaveProblem(gradients.graph, gradients.needed, kind.shared, *step)

    @property
    def of_layers(self) -> list[tuple[Choice, ...]]:
        return [self.of_kind[kind] for kind in self.layers]

    def at(self, batch: int, seq: int, kinds: Sequence[LayerKind] | None = None) -> Frontiers:
        """Return the choices at another step, or for other gradients."""
        return frontiers(self.model, kinds or self.kinds, batch, seq, self.costs, self.parts)

    def points(self) -> list[tuple[int, float, int]]:
        """Return (saved bytes, recomputed share of the forward, recomputed layer inputs).

        Consecutive layers with the same step count as one.
        """
        frontiers = self.of_layers
        shared = self.shared_bytes
        every = [mixed(frontiers, mix, shared) for mix in mixes(frontiers, shared)]
        corners = [
            choice
            for i, choice in enumerate(every)
            if i in (0, len(every) - 1) or not _on_a_line(*every[i - 1 : i + 2])
        ]
        forward_flops = sum(self.layer_flops) or 1
        points = [(c.size_bytes + self.outside_bytes, c.flops / forward_flops, 0) for c in corners]
        least = self._least()
        restored = most_shared(restorable(self.model, least.plans, least.layers))
        if restored:
            share = dataclasses.replace(least, restored=restored).recompute_flops_ratio
            size = self._running_again(least) - sum(map(self._input_bytes, restored))
            points.append((size + self.outside_bytes, share, len(restored)))
        return points

    def plan(self, budget: MemoryBudget) -> MemoryPlan:
        """Return the plan with the fewest recomputed operations; MemoryBudgetError if none fits."""
        choices = self.choices(budget)
        if choices is not None:
            return self.planned(choices)
        assert budget.size_bytes is not None
        return self._sharing_inputs(budget, budget.size_bytes - self.outside_bytes)

    def choices(self, budget: MemoryBudget) -> list[Choice] | None:
        """Return each layer's choice within a budget, at the least cost, or None."""
        if budget.share == 1:
            return [self.firsts[kind] for kind in self.layers]
        best = self.within(self.of_kind, budget)
        if not self.by_flops or best == [front[0] for front in self.of_layers]:
            return best
        candidates = [
            candidate
            for candidate in (best, self.within(self.by_flops, budget))
            if candidate is not None
        ]
        return min(
            candidates, key=lambda candidate: sum(choice.cost for choice in candidate), default=None
        )

    def within(
        self, of_kind: Sequence[Sequence[Choice]], budget: MemoryBudget
    ) -> list[Choice] | None:
        """Return each layer's choice on these frontiers of the kinds, within a budget, or None."""
        of_layers = [of_kind[kind] for kind in self.layers]
        mix = spread(of_layers, budget, self.outside_bytes, self.shared_bytes)
        if mix is None:
            return None
        return [front[index] for front, index in zip(of_layers, mix, strict=True)]

    def _sharing_inputs(self, budget: MemoryBudget, limit: int) -> MemoryPlan:
        """Return the plan whose layers save the least, with the fewest recomputed inputs."""
        least = self._least()
        can_be = restorable(self.model, least.plans, least.layers)
        size = self._running_again(least)
        spared = [self._input_bytes(layer) for layer in most_shared(can_be)]
        if size - sum(spared) > limit:
            needed = min(point[0] for point in self.points())
            raise MemoryBudgetError(
                f"memory_budget={budget.size_bytes} bytes is less than the least that batch "
                f"{budget.batch} of {budget.seq} tokens needs for backward, {needed} bytes; give "
                "that much, or use a smaller batch or shorter sequences"
            )
        count = -((limit - size) // max(spared))
        restored = shared_inputs(can_be, count) or most_shared(can_be)
        return dataclasses.replace(least, restored=restored)

    def _running_again(self, least: MemoryPlan) -> int:
        """Return the bytes of a plan's layers, and of shared values for a repeated forward."""
        layers = sum(least.choices[index].size_bytes for index in least.layers)
        return layers + sum(self.shared_bytes.values())

    def _least(self) -> MemoryPlan:
        return self.planned([frontier[-1] for frontier in self.of_layers])

    def _input_bytes(self, layer: int) -> int:
        value = self.model.blocks[self.model.layers[layer]].inputs[0]
        return int(value.type.size_bytes.subs(TOKENS, self.batch * self.seq))

    def planned(self, of_layers: Sequence[Choice]) -> MemoryPlan:
        taken = list(dict.fromkeys(zip(self.layers, of_layers, strict=True)))
        plans, choices = [], []
        for kind_index, choice in taken:
            kind = self.kinds[kind_index]
            several = sum(other == kind_index for other, _ in taken) > 1
            name = kind.name
            if several:
                name += f"_plan{self._known(kind_index).index(choice)}"
            plans.append(plan_layer(kind, choice.saved, name))
            choices.append(choice)
        layers = tuple(taken.index(pair) for pair in zip(self.layers, of_layers, strict=True))
        return MemoryPlan(tuple(plans), layers, tuple(choices), self.layer_flops)

    def _known(self, kind: int) -> tuple[Choice, ...]:
        by_flops = self.by_flops[kind] if self.by_flops else ()
        return tuple(dict.fromkeys((*self.of_kind[kind], *by_flops)))


def frontiers(
    model: ModelGraph,
    kinds: Sequence[LayerKind],
    batch: int,
    seq: int,
    costs: RankCosts | None = None,
    parts: int = 1,
) -> Frontiers:
    """Return the frontier of every kind of layer, at a step of `batch` sequences of `seq` tokens.

    Args:
        costs: the seconds of a rank's nodes; None to count operations.
        parts: ranks that share the tokens of a sequence; `seq` counts a rank's tokens.
    """
    tokens = batch * seq
    of_block = [graph_flops(block, tokens, parts * seq) for block in model.blocks]
    flops = tuple(of_block[index] for index in model.layers)
    read = {name for kind in kinds for name in _read_of_shared(kind)}
    outside = outside_bytes(model, read, tokens)
    shared = {
        value.name: int(value.type.size_bytes.subs(TOKENS, tokens))
        for block in model.blocks
        for value in block.inputs[len(block.outputs) :]
        if value.name not in read
    }
    layers = _kind_of_layers(kinds)
    step = (batch, seq, costs, parts)
    return Frontiers(tuple(kinds), layers, flops, outside, shared, model, *step)


def _read_of_shared(kind: LayerKind) -> set[str]:
    """Return shared values that backward reads, directly or through a view."""
    storages = Storages.of(kind.gradients.graph)
    return {storages[name].name for name in kind.gradients.needed} & {*kind.shared}


def replanned(plan: MemoryPlan, ways: Frontiers) -> MemoryPlan | None:
    """Return a plan's choices for layers of other sizes; None if a saved tensor is missing."""
    plans = []
    for index, choice in enumerate(plan.choices):
        kind = ways.kinds[ways.layers[plan.layers.index(index)]]
        if not kind.gradients.graph.types.keys() >= set(choice.saved):
            return None
        name = plan.plans[index].forward.name.removesuffix("_forward")
        plans.append(plan_layer(kind, choice.saved, name))
    return dataclasses.replace(plan, plans=tuple(plans))


def save_all(kinds: Sequence[LayerKind]) -> MemoryPlan:
    """Return the plan in which every layer saves all values that its backward reads."""
    plans = [plan_layer(kind, kind.gradients.needed, kind.name) for kind in kinds]
    nothing = Choice((), (), 0, 0, 0)
    return MemoryPlan(tuple(plans), _kind_of_layers(kinds), (nothing,) * len(plans), ())


def _kind_of_layers(kinds: Sequence[LayerKind]) -> tuple[int, ...]:
    of_layer = {layer: index for index, kind in enumerate(kinds) for layer in kind.layers}
    return tuple(of_layer[layer] for layer in range(len(of_layer)))


def _on_a_line(left: Choice, middle: Choice, right: Choice) -> bool:
    first = (middle.size_bytes - left.size_bytes) * (right.cost - left.cost)
    return first == (right.size_bytes - left.size_bytes) * (middle.cost - left.cost)
