"""Plan how ranks hold every tensor of a graph: the cheapest typed way, exactly.

Nodes are taken in order. Ranks can run each in several ways (`Operator.shardings`), whose inputs
are brought into the layouts that a way takes by transitions:

    - → =    0 forward, an all-reduce backward          + → -    an all-reduce forward, 0 backward
    - → |d   0 forward, an all-gather backward          |d → -   an all-gather forward, 0 backward
    = → |d   0 both ways                                |d → +   0 both ways

    + → |d   a reduce-scatter, then an all-gather       |d → =   an all-gather, a reduce-scatter

The last two are of tokens, whose parts ranks hold where that is asked for (sequence parallelism);
a copy that was gathered so is gathered again there, one all-gather more, where backward reads it or
a part that was taken of it. Where gradients flow back to parts of tokens, these are not combined:
backward would find the whole kept, which is what they are to spare.

Values are also brought by paths of these: - → + is - → |d → +, and = → - is = → |d → -, of the
cheapest dim.
A layout that a value was once brought into is there for all later readers, so that what is cheapest
for one node depends on what others did. A state is which layouts the values that are still read
have; for each state the cheapest way there is kept (dynamic programming), and a state is dropped
only where another one, with the transitions that make up for what it lacks, costs no more. So the
result is the least of all assignments of ways and layouts. `ParallelPlan.widest` is the
largest number of states that there were.

An adapter's weight is held in the layout that its reader takes, or in parts that are gathered where
it is read; a copy of which each rank has a part of the gradient (=) costs an all-reduce of it once
an optimizer step. The base's weights, and the ways of the base's nodes, may be given: the search
for bypass networks takes them so (dependent parallelization). (Long by a few lines: one dynamic
program and its steps.)
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pcg.errors import TypeCheckError
from pcg.ir.analysis.trainable import reachable, trained
from pcg.ir.graph import Graph, Node, Parameter
from pcg.ir.layouts import (
    PRE_REDUCE,
    REPLICATED,
    WHOLE,
    Layout,
    Sharding,
    partitioned,
    token_part,
)
from pcg.ir.operators import operator
from pcg.ir.types import RANK, TensorType
from pcg.parallel.choice_maker import NodePlanBuilder
from pcg.parallel.costs.layer_costs import LayerCosts
from pcg.parallel.parallel_plan import (
    Constraints,
    NodePlan,
    ParallelPlan,
    Reshard,
    is_saved,
    kept,
    transitions,
)
from pcg.parallel.saved_for_backward import saved_reads

Versions = tuple[tuple[str, frozenset[Layout]], ...]
"""The layouts of the values that are still read, by name in order."""


@dataclass(frozen=True, slots=True)
class _State:
    versions: dict[str, frozenset[Layout]]
    cost: tuple[float, int]
    parent: _State | None = None
    choice: NodePlan | None = None


def plan(
    graph: Graph,
    degree: int,
    costs: LayerCosts,
    fixed: Constraints | None = None,
    trains: bool = True,
    token_nodes: frozenset[str] = frozenset(),
) -> ParallelPlan:
    """The cheapest way to run a graph over ranks.

    Args:
        graph: with whole tensors.
        degree: number of ranks.
        costs: what ranks pay.
        fixed: what is given.
        trains: whether there is a backward.
        token_nodes: names of nodes that ranks may run on parts of the tokens.
    Raises:
        TypeCheckError: no way to run an operator takes its inputs in the layouts that can be had;
            names the operator, the layouts, and what it takes.
    """
    return Planner(graph, degree, costs, trains, token_nodes).plan(fixed or Constraints())


class Planner:
    """Plans one graph; what it learns of costs serves further plans of it.

    Args:
        graph: with whole tensors.
        degree: number of ranks.
        costs: what ranks pay.
        trains: whether there is a backward.
        token_nodes: names of nodes that ranks may run on parts of the tokens.
    """

    def __init__(
        self,
        graph: Graph,
        degree: int,
        costs: LayerCosts,
        trains: bool = True,
        token_nodes: frozenset[str] = frozenset(),
    ) -> None:
        self.graph = graph
        self.degree = degree
        self.costs = costs
        self.active = _with_gradient(graph) if trains else frozenset[str]()
        self.free: frozenset[tuple[str, str]] = frozenset()
        self._token_nodes = token_nodes
        self._kept_reads = self._reads_kept()
        self._last = _last_readers(graph)
        self._parts: dict[TensorType, tuple[Layout, ...]] = {}
        self._paths: dict[object, tuple[float, tuple[Reshard, ...]] | None] = {}
        self._ways = {node.name: self._rules(node) for node in graph.nodes}

    def where_free(self, free: frozenset[tuple[str, str]]) -> Planner:
        """A planner for which some messages cost nothing to start.

        Args:
            free: forward or backward, and the kind.
        """
        other = copy.copy(self)
        other.free, other._paths = free, {}
        return other

    def of(self, graph: Graph) -> Planner:
        """A planner of a graph of the same nodes, or fewer, that read values of the same types."""
        other = copy.copy(self)
        other.graph = graph
        other.active = self.active & graph.types.keys()
        other._kept_reads = other._reads_kept()
        other._last = _last_readers(graph)
        return other

    def _reads_kept(self) -> frozenset[tuple[str, int]]:
        return saved_reads(self.graph, self.active) if self._token_nodes else frozenset()

    def plan(self, fixed: Constraints) -> ParallelPlan:
        """The cheapest plan that keeps to what is given, where each message is by itself."""
        inputs = self.graph.inputs
        given = {v.name: self._made(v.type, fixed.inputs.get(v.name, WHOLE)) for v in inputs}
        states = [_State(given, (0.0, 0))]
        widest = 1
        for place, node in enumerate(self.graph.nodes):
            found: dict[Versions, _State] = {}
            for state in states:
                for new in self._after(state, place, node, fixed):
                    key = tuple(sorted(new.versions.items()))
                    if key not in found or new.cost < found[key].cost:
                        found[key] = new
            if not found:
                raise TypeCheckError(self._refusal(node, states[0], fixed))
            states = self._undominated(found.values(), fixed)
            widest = max(widest, len(states))
        ends = [end for state in states if (end := self._ended(state, fixed)) is not None]
        if not ends:
            wanted = ", ".join(map(str, self._outputs(fixed)))
            raise TypeCheckError(f"outputs of {self.graph.name} cannot be brought into {wanted}")
        end = min(ends, key=lambda state: state.cost)
        choices: list[NodePlan] = []
        at: _State | None = end
        while at is not None and at.choice is not None:
            choices.append(at.choice)
            at = at.parent
        outputs, *rest = choices
        names = [node.name for node in self.graph.nodes]
        return ParallelPlan(
            dict(zip(names, reversed(rest), strict=True)),
            outputs,
            fixed.inputs,
            end.cost[0],
            widest,
        )

    # ------------------------------------------------------------------------------------- a node

    def _rules(self, node: Node) -> dict[Sharding, float]:
        """The ways of a node whose parts are equal, with what they cost a rank."""
        types = tuple(self.graph.types[name] for name in node.inputs)
        outputs = tuple(value.type for value in node.outputs)
        needs = tuple(name in self.active for name in node.inputs)
        is_whole = node.name not in self._token_nodes
        found = {}
        for rule in operator(node.op).shardings(types, dict(node.attributes)):
            held = (*zip(types, rule.inputs, strict=True), *zip(outputs, rule.outputs, strict=True))
            if is_whole and any(_is_of_tokens(type_, layout) for type_, layout in held):
                continue
            if all(self.fits(type_, layout) for type_, layout in held):
                found[rule] = self.costs.node(node, self.graph, rule, needs)
        return found

    def fits(self, type_: TensorType, layout: Layout) -> bool:
        """Whether ranks can hold it so: equal parts of a number, or of an open rank.

        Or of the tokens, where that is asked for.
        """
        if not layout.dim:
            return True
        if -layout.dim > len(type_.dims):
            return False
        if _is_of_tokens(type_, layout):
            return bool(self._token_nodes)
        size = type_.shape[layout.dim]
        return (isinstance(size, int) or size == RANK) and layout.fits(type_, self.degree)

    def _after(self, state: _State, place: int, node: Node, fixed: Constraints) -> Iterator[_State]:
        only = fixed.rules.get(node.name)
        ways = self._ways[node.name]
        for rule in ways if only is None else ways.keys() & {only}:
            work = ways[rule]
            for versions, (cost, count), choice in self._brought(state, node, rule, fixed):
                for value, layout in zip(node.outputs, rule.outputs, strict=True):
                    versions[value.name] = self._made(value.type, layout)
                for name in self._last.get(place, ()):
                    versions.pop(name, None)
                total = (state.cost[0] + work + cost, state.cost[1] + count)
                yield _State(versions, total, state, choice(rule, work))

    def _made(self, type_: TensorType, layout: Layout) -> frozenset[Layout]:
        """The layouts of a value that is made so; what was not gathered is kept."""
        return frozenset([layout, kept(layout)] if self._is_marked(type_, layout) else [layout])

    def _is_marked(self, type_: TensorType, layout: Layout) -> bool:
        """Whether a mark says that backward has it; the whole and parts of tokens it always has."""
        always = (WHOLE, token_part(type_))
        return bool(self._token_nodes) and type_.is_token_wise and layout not in always

    def _with(
        self, type_: TensorType, have: frozenset[Layout], steps: Iterable[Reshard]
    ) -> frozenset[Layout]:
        """The layouts of a value after some transitions."""
        for step in steps:
            is_had = not self._is_marked(type_, step.before) or kept(step.before) in have
            if is_had and step.op != "gather" and not is_saved(step.after):
                have |= self._made(type_, step.after)
            have |= {step.after}
        return have

    def _brought(
        self, state: _State, node: Node, rule: Sharding, fixed: Constraints
    ) -> Iterator[tuple[dict[str, frozenset[Layout]], tuple[float, int], NodePlanBuilder]]:
        """The ways to have the inputs in a rule's layouts: versions, cost and number of steps."""
        names, holdings = [], []
        for name, layout in dict.fromkeys(zip(node.inputs, rule.inputs, strict=True)):
            parameter = self.graph.parameters_by_name.get(name)
            if parameter is None:
                continue
            if parameter.role != "adapter":
                if not _may_be(fixed.layouts.get(name), layout):
                    return
            elif name in fixed.gathered and layout in (fixed.layouts[name], PRE_REDUCE):
                return
            elif name not in state.versions:
                held = self._holdings(parameter, layout, fixed)
                if not held:
                    return
                names.append(name)
                holdings.append(held)
        for holding in itertools.product(*holdings):
            versions = dict(state.versions)
            made = NodePlanBuilder()
            for name, layout in zip(names, holding, strict=True):
                versions[name] = frozenset([layout])
                made.hold(name, layout, self.graph.types[name], name in self.active, self.costs)
            if self._bring(versions, *self._wanted(node, rule), made, fixed):
                yield versions, (made.cost, made.count), made

    def _wanted(self, node: Node, rule: Sharding) -> tuple[Sequence[str], Sequence[Layout]]:
        """The inputs of a node, and what it wants of each."""
        if not self._kept_reads:
            return node.inputs, rule.inputs
        names, layouts = list(node.inputs), list(rule.inputs)
        for index, (name, layout) in enumerate(zip(node.inputs, rule.inputs, strict=True)):
            is_read = (node.name, index) in self._kept_reads
            if is_read and self._is_marked(self.graph.types[name], layout):
                names.append(name)
                layouts.append(kept(layout))
        return names, layouts

    def _bring(
        self,
        versions: dict[str, frozenset[Layout]],
        names: Sequence[str],
        layouts: Sequence[Layout],
        made: NodePlanBuilder,
        fixed: Constraints,
    ) -> bool:
        """Bring values into layouts; False where there is no way."""
        for name, layout in dict.fromkeys(zip(names, layouts, strict=True)):
            if name not in versions or layout in versions[name]:
                continue
            path = self._path(name, versions[name], layout, fixed)
            if path is None:
                return False
            cost, steps = path
            type_ = self.graph.types[name]
            versions[name] = self._with(type_, versions[name], steps)
            messages = [(step, step.message(type_, self.degree)) for step in steps]
            made.bring(name, cost, messages, name in self.active, self.costs)
        return True

    def _holdings(self, parameter: Parameter, wanted: Layout, fixed: Constraints) -> list[Layout]:
        """Layouts to hold an adapter's weight in that a node reads in a wanted one."""
        name = parameter.name
        only = fixed.layouts.get(name)
        if wanted == PRE_REDUCE:
            return []  # a part among zeros is the part
        choices = [wanted]
        if wanted in (WHOLE, REPLICATED) and name not in fixed.direct:
            choices += self.parts(parameter.type)
        if only is not None:
            is_reached = self._path(name, frozenset([only]), wanted, fixed) is not None
            choices = [only] if is_reached else []
        return choices

    def _ended(self, state: _State, fixed: Constraints) -> _State | None:
        """With the outputs in their layouts; None where there is no way."""
        versions, made = dict(state.versions), NodePlanBuilder()
        layouts = self._outputs(fixed)
        if not self._bring(versions, self.graph.outputs, layouts, made, fixed):
            return None
        total = (state.cost[0] + made.cost, state.cost[1] + made.count)
        return _State(versions, total, state, made(Sharding(layouts, ()), 0.0))

    def _outputs(self, fixed: Constraints) -> tuple[Layout, ...]:
        return tuple(fixed.outputs.get(name, WHOLE) for name in self.graph.outputs)

    # --------------------------------------------------------------------------------- transitions

    def _path(
        self, name: str, have: frozenset[Layout], wanted: Layout, fixed: Constraints
    ) -> tuple[float, tuple[Reshard, ...]] | None:
        """The cheapest transitions to a layout from those that a value has, and their cost."""
        if wanted in have:
            return 0.0, ()
        if name in fixed.direct:
            return None
        type_, is_active = self.graph.types[name], name in self.active
        key = (type_, is_active, have, wanted)
        if key not in self._paths:
            self._paths[key] = self.cheapest(type_, is_active, have).get(wanted)
        return self._paths[key]

    def cheapest(
        self, type_: TensorType, is_active: bool, have: Iterable[Layout]
    ) -> dict[Layout, tuple[float, tuple[Reshard, ...]]]:
        """The cheapest transitions to every layout from those that a value has, and their cost.

        Args:
            type_: of the value.
            is_active: whether a gradient flows back to it.
            have: its layouts.
        """
        best: dict[Layout, tuple[float, tuple[Reshard, ...]]] = {}
        best.update(dict.fromkeys(sorted(have, key=str), (0.0, ())))
        changed = list(best)
        tokens = token_part(type_) if self._token_nodes and type_.is_token_wise else None
        while changed:
            layout = changed.pop(0)
            cost, steps = best[layout]
            for step in transitions(layout, self.parts(type_), tokens):
                if step.op == "combine" and is_active and step.is_of_tokens(type_):
                    continue
                total = cost + self._step_cost(type_, is_active, step)
                known = best.get(step.after)
                if known is None or (total, len(steps) + 1) < (known[0], len(known[1])):
                    best[step.after] = (total, (*steps, step))
                    changed.append(step.after)
        return best

    def parts(self, type_: TensorType) -> tuple[Layout, ...]:
        """The parts that ranks can hold of a tensor."""
        if type_ not in self._parts:
            every = map(partitioned, range(-len(type_.dims), 0))
            self._parts[type_] = tuple(part for part in every if self.fits(type_, part))
        return self._parts[type_]

    def _step_cost(self, type_: TensorType, is_active: bool, step: Reshard) -> float:
        cost = self.send(step, type_, is_active)
        if step.op == "place" or (step.op == "take" and is_active):
            cost += self.costs.place(type_, step.dim)
        return cost

    def send(self, step: Reshard, type_: TensorType, is_active: bool) -> float:
        """What the messages of a transition cost, forward and backward."""
        cost = 0.0
        message = step.message(type_, self.degree)
        may_meet = not step.is_of_tokens(type_)
        for way, kind in (("forward", step.forward), ("backward", step.backward)):
            if kind and (way == "forward" or is_active):
                cost += self.costs.send(kind, message)
                is_free = may_meet and (way, kind) in self.free
                cost -= self.costs.send(kind) if is_free else 0.0
        return cost

    def _undominated(self, states: Iterable[_State], fixed: Constraints) -> list[_State]:
        kept: list[_State] = []
        for state in sorted(states, key=lambda state: state.cost):
            if not any(self._dominates(other, state, fixed) for other in kept):
                kept.append(state)
        return kept

    def _dominates(self, one: _State, other: _State, fixed: Constraints) -> bool:
        """Whether all that the other can do, the one can do for no more."""
        cost, count = one.cost
        for name, layouts in other.versions.items():
            have = one.versions.get(name)
            if have is None:
                return False
            had = have
            for layout in sorted(layouts - have, key=is_saved):
                if layout in had:
                    continue
                path = self._path(name, had if is_saved(layout) else have, layout, fixed)
                if path is None:
                    return False
                had = self._with(self.graph.types[name], had, path[1])
                cost, count = cost + path[0], count + len(path[1])
                if (cost, count) > other.cost:
                    return False
        return True

    # --------------------------------------------------------------------------------------- errors

    def _refusal(self, node: Node, state: _State, fixed: Constraints) -> str:
        held = []
        for name in node.inputs:
            layouts = state.versions.get(name) or {fixed.layouts.get(name, WHOLE)}
            held.append(f"%{name} in {' or '.join(sorted(map(str, layouts)))}")
        takes = dict.fromkeys(map(str, self._ways[node.name]))
        return (
            f"operator {node.op!r} (in {node.scope or 'the layer'}) cannot run over {self.degree} "
            f"ranks with {', '.join(held)}; it takes {', '.join(takes) or 'no layouts'}"
        )


def _is_of_tokens(type_: TensorType, layout: Layout) -> bool:
    """Whether a layout is of parts of the tokens."""
    return bool(layout.dim) and type_.is_token_wise and layout.dim == -len(type_.dims)


def _may_be(fixed: Layout | None, layout: Layout) -> bool:
    """Whether a frozen weight may be held so; without a gradient whole and replicated are one."""
    if fixed is None:
        return True
    return layout in (WHOLE, REPLICATED, PRE_REDUCE) if fixed == WHOLE else layout == fixed


def _with_gradient(graph: Graph) -> frozenset[str]:
    """Values that a gradient may flow back to: what a layer hands on, and what adapters reach."""
    carried = (value.name for value in graph.inputs[: len(graph.outputs)])
    return reachable(graph, (*carried, *trained(graph)))


def _last_readers(graph: Graph) -> dict[int, list[str]]:
    """Values that no node after one reads, by its place; outputs are read to the end."""
    last: dict[str, int] = {}
    for place, node in enumerate(graph.nodes):
        for name in (*node.inputs, *(value.name for value in node.outputs)):
            last[name] = place
    found: dict[int, list[str]] = {}
    for name, place in last.items():
        if name not in graph.outputs:
            found.setdefault(place, []).append(name)
    return found
