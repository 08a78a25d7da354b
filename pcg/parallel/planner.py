"""Planner of the layouts of a graph's tensors over ranks: the exact cheapest typed plan.

The planner visits nodes in order. Ranks can run each node by several rules (`Operator.shardings`),
each with layouts of its inputs. A value brought into a layout has it for all later readers, so the
cheapest rule of a node depends on other nodes. A state is the layouts of the values with later
readers. Dynamic programming keeps the cheapest path to each state, and drops a state only if
another costs no more, including the reshards to the layouts that it lacks. The result is therefore
the least of all assignments of rules and layouts, as long as a node has at most `_WIDTH` states.
Where more values live together, as in a delta rule or latent attention, the cheapest states stay.

Reshards of a value, forward and backward:

    - → =    0 forward, an all-reduce backward          + → -    an all-reduce forward, 0 backward
    - → |d   0 forward, an all-gather backward          |d → -   an all-gather forward, 0 backward
    = → |d   0 both ways                                |d → +   0 both ways
    = → ~    0 both ways

    |d → ~   an all-to-all, both ways                   ~ → |d   an all-to-all, both ways

    + → |d   a reduce-scatter, then an all-gather       |d → =   an all-gather, a reduce-scatter

and paths of these: - → + is - → |d → +, and = → - is = → |d → -, of the cheapest dim. The last two
apply to tokens (sequence parallelism). Such a gathered copy is gathered again in the backward, with
another all-gather, if backward reads it or a shard taken from it. If gradients flow back to token
shards, these are not combined: backward would save the whole value.

Ranks hold an adapter's weight in the layout that its reader takes, or in parts that are gathered
for each reader. A copy whose gradient is split over ranks (=) costs an all-reduce of the weight
once an optimizer step. The base's weights, and the rules of the base's nodes, may be fixed: the
search for bypass networks fixes them (dependent parallelization).
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from pcg.errors import TypeCheckError
from pcg.ir.analysis.dataflow import reachable, trained
from pcg.ir.graph import Graph, Node, Parameter
from pcg.ir.layouts import (
    PRE_REDUCE,
    REPLICATED,
    ROUTED,
    WHOLE,
    Layout,
    Sharding,
    partitioned,
    token_part,
)
from pcg.ir.operators import operator
from pcg.ir.types import RANK, State, TensorType
from pcg.parallel.base_plan import routed_products, shared_rules
from pcg.parallel.costs.layer_costs import LayerCosts
from pcg.parallel.parallel_plan import (
    SAVED_COPY,
    Constraints,
    NodePlan,
    ParallelPlan,
    Reshard,
    is_saved,
    saved,
)
from pcg.parallel.sequence_parallel import saved_reads

# ------------------------------------------------------------------------------------------ routing


class Routing(NamedTuple):
    """The choice of experts in a layer over ranks with equal parts of them.

    Attributes:
        indices: the name of the choices [T, k].
        experts: the number of a rank's experts.
        choices: k; 0 if several routers choose, so that rows have no common all-to-all.
    """

    indices: str
    experts: int
    choices: int


def routing_of(graph: Graph, degree: int) -> Routing | None:
    """Return the routing of a layer; None unless ranks can have equal parts of its experts."""
    routings = set()
    for node in routed_products(graph):
        indices, count = node.inputs[1], graph.types[node.inputs[2]].features[0]
        if count % degree:
            return None
        choices = graph.types[indices].features[-1]
        routings.add(Routing(indices, count // degree, choices))
    if len(routings) == 1:
        return routings.pop()
    return Routing("", 0, 0) if routings else None


def is_of_choices(type_: TensorType, choices: int) -> bool:
    """Return whether a tensor has a row for each choice of a token, [T, k, …]."""
    return len(type_.dims) > 2 and type_.shape[1] == choices


# --------------------------------------------------------------------------------------- resharding


Path = tuple[float, tuple[Reshard, ...]]
"""A path's cost, and its reshards in order."""


class ReshardPaths:
    """Cheapest paths between layouts, cached.

    With `shards_tokens` also to token shards, with a routing also to rows of experts.
    """

    def __init__(
        self,
        degree: int,
        costs: LayerCosts,
        shards_tokens: bool,
        routing: Routing | None = None,
    ) -> None:
        self.degree = degree
        self.costs = costs
        self.shards_tokens = shards_tokens
        self.routing = routing
        self._free: frozenset[tuple[str, str]] = frozenset()
        self._parts: dict[TensorType, tuple[Layout, ...]] = {}
        self._known: dict[object, Path | None] = {}
        self._additions: dict[tuple[TensorType, bool, bool], _Additions] = {}

    def where_free(self, free: frozenset[tuple[str, str]]) -> ReshardPaths:
        """Return the paths if some messages, by direction and kind, have no startup cost."""
        other = copy.copy(self)
        other._free, other._known, other._additions = free, {}, {}
        return other

    # ----------------------------------------------------------------------------------- layouts

    def fits(self, type_: TensorType, layout: Layout) -> bool:
        """Return whether a layout has equal parts of a number or a symbolic rank.

        Token shards also fit with `shards_tokens`, and experts with a routing.
        """
        if layout.sharers > 1:
            return layout.fits(type_, self.degree)
        if layout.state is State.ROUTED and self.routing is None:
            return False
        if not layout.dim:
            return True
        if -layout.dim > len(type_.dims):
            return False
        if layout == token_part(type_):
            return self.shards_tokens
        size = type_.shape[layout.dim]
        return (isinstance(size, int) or size == RANK) and layout.fits(type_, self.degree)

    def parts(self, type_: TensorType) -> tuple[Layout, ...]:
        if type_ not in self._parts:
            every = map(partitioned, range(-len(type_.dims), 0))
            self._parts[type_] = tuple(part for part in every if self.fits(type_, part))
        return self._parts[type_]

    def is_marked(self, type_: TensorType, layout: Layout) -> bool:
        """Return whether backward's layouts have marks; wholes and token shards need none."""
        always = (WHOLE, token_part(type_))
        return self.shards_tokens and type_.is_token_wise and layout not in always

    def made(self, type_: TensorType, layout: Layout) -> frozenset[Layout]:
        """Return the layouts of a value that a node computes; an ungathered value is saved."""
        return frozenset([layout, saved(layout)] if self.is_marked(type_, layout) else [layout])

    def after(
        self, type_: TensorType, have: frozenset[Layout], reshards: Iterable[Reshard]
    ) -> frozenset[Layout]:
        for reshard in reshards:
            is_had = not self.is_marked(type_, reshard.before) or saved(reshard.before) in have
            if is_had and reshard.op != "gather" and not is_saved(reshard.after):
                have |= self.made(type_, reshard.after)
            have |= {reshard.after}
        return have

    # ------------------------------------------------------------------------------------- paths

    def path(
        self, type_: TensorType, is_active: bool, have: frozenset[Layout], wanted: Layout
    ) -> Path | None:
        key = (type_, is_active, have, wanted)
        if key not in self._known:
            self._known[key] = self.cheapest(type_, is_active, have).get(wanted)
        return self._known[key]

    def additions(self, type_: TensorType, is_active: bool, is_direct: bool) -> _Additions:
        key = (type_, is_active, is_direct)
        if key not in self._additions:
            self._additions[key] = _Additions(self, *key)
        return self._additions[key]

    def cheapest(
        self, type_: TensorType, is_active: bool, have: Iterable[Layout]
    ) -> dict[Layout, Path]:
        """Return the cheapest path from the layouts of a value to every other layout.

        `is_active` is True if a gradient flows back to the value.
        """
        best: dict[Layout, Path] = {}
        best.update(dict.fromkeys(sorted(have, key=str), (0.0, ())))
        changed = list(best)
        tokens = token_part(type_) if self.shards_tokens and type_.is_token_wise else None
        while changed:
            layout = changed.pop(0)
            cost, path = best[layout]
            routing = self.routing if type_.is_token_wise else None
            for reshard in reshards_from(layout, self.parts(type_), tokens, routing):
                if reshard.op == "collect" and not is_of_choices(type_, reshard.choices):
                    continue
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
        """Return the cost of a reshard's messages, forward and backward."""
        cost = 0.0
        message = reshard.message(type_, self.degree)
        may_coalesce = not reshard.is_of_tokens(type_)
        for way, kind in (("forward", reshard.forward), ("backward", reshard.backward)):
            if kind and (way == "forward" or is_active):
                cost += self.costs.send(kind, message)
                is_free = may_coalesce and (way, kind) in self._free
                cost -= self.costs.send(kind) if is_free else 0.0
        return cost


class _Additions(dict[tuple[frozenset[Layout], frozenset[Layout]], tuple[float, int]]):
    """The cost and number of reshards that bring a value from layouts into other layouts, too."""

    def __init__(
        self, paths: ReshardPaths, type_: TensorType, is_active: bool, is_direct: bool
    ) -> None:
        super().__init__()
        self._paths, self._value, self._is_direct = paths, (type_, is_active), is_direct

    def __missing__(self, key: tuple[frozenset[Layout], frozenset[Layout]]) -> tuple[float, int]:
        self[key] = found = self._found(*key)
        return found

    def _found(self, have: frozenset[Layout], wanted: frozenset[Layout]) -> tuple[float, int]:
        had, cost, count = have, 0.0, 0
        for layout in sorted(wanted - have, key=is_saved):
            if layout in had:
                continue
            path = self._paths.path(*self._value, had if is_saved(layout) else have, layout)
            if path is None or self._is_direct:
                return math.inf, 0
            had = self._paths.after(self._value[0], had, path[1])
            cost, count = cost + path[0], count + len(path[1])
        return cost, count


@cache
def reshards_from(
    layout: Layout,
    parts: tuple[Layout, ...],
    tokens: Layout | None = None,
    routing: Routing | None = None,
) -> tuple[Reshard, ...]:
    """Return the reshards from a layout.

    Args:
        parts: the partitioned layouts of the tensor.
        tokens: the layout that shards its tokens, if allowed.
        routing: the routing of its tokens, if ranks may read the rows of their experts alone.
    """
    choices = 0 if routing is None or tokens is None else routing.choices
    steps: list[tuple[str, Layout]]
    if layout == SAVED_COPY:
        steps = [("recompute", saved(part)) for part in parts if part != tokens]
        steps += [("recompute", saved(ROUTED))] * (routing is not None)
    elif is_saved(layout):
        steps = [("recompute", saved(PRE_REDUCE))] if layout.state is State.PARTITIONED else []
    elif layout == WHOLE:
        steps = [("replicate", REPLICATED), *(("partition", part) for part in parts)]
    elif layout == REPLICATED:
        steps = [("take", part) for part in parts]
        steps += [("route", ROUTED)] * (routing is not None)
    elif layout.sharers > 1:
        steps = []
    elif layout == ROUTED:
        steps = [("collect", tokens)] if tokens is not None and choices else []
    elif layout == PRE_REDUCE:
        steps = [("reduce", WHOLE)]
        if tokens is not None:
            steps.append(("scatter", tokens))
    else:
        steps = [("combine", WHOLE), ("place", PRE_REDUCE)]
        if layout == tokens:
            steps += [("gather", REPLICATED), ("regather", SAVED_COPY)]
            steps += [("dispatch", ROUTED)] * bool(choices)
    counts = {"collect": choices, "dispatch": choices}
    return tuple(Reshard(op, layout, after, counts.get(op, 0)) for op, after in steps)


# ------------------------------------------------------------------------------------------ planner


_FREE = Constraints()
_WIDTH = 128

Versions = dict[str, frozenset[Layout]]
"""The layouts of the values with later readers, by name."""


@dataclass(frozen=True, slots=True)
class _State:
    """The layouts of values after a node, with the cheapest path: previous state, and plan.

    `cost` is the path's cost, and its number of reshards.
    """

    versions: Versions
    cost: tuple[float, int]
    parent: _State | None = None
    node_plan: NodePlan | None = None


@dataclass
class _NodePlanBuilder:
    """Sums the cost of the reshards that bring a node's inputs into layouts.

    `held` are the layouts of adapters' weights that no earlier node has read.
    """

    cost: float = 0.0
    step_bytes: int = 0
    reshards: list[tuple[str, tuple[Reshard, ...]]] = field(default_factory=list)
    held: list[tuple[str, Layout]] = field(default_factory=list)

    def state_after(
        self, state: _State, versions: Versions, rule: Sharding, work: float = 0.0
    ) -> _State:
        """Return the state after a node that runs by a rule, at the cost of its own work."""
        count = sum(len(some) for _, some in self.reshards)
        total = (state.cost[0] + work + self.cost, state.cost[1] + count)
        parts = (tuple(self.reshards), tuple(self.held), work + self.cost, self.step_bytes)
        return _State(versions, total, state, NodePlan(rule, *parts))


class Planner:
    """Plans a graph of whole tensors; its cached costs serve further plans.

    Args:
        trains: True for a graph with a backward.
        token_nodes: names of nodes that ranks may run on token shards.
    """

    def __init__(
        self,
        graph: Graph,
        degree: int,
        costs: LayerCosts,
        trains: bool = True,
        token_nodes: frozenset[str] = frozenset(),
    ) -> None:
        self.degree = degree
        self.costs = costs
        self.paths = ReshardPaths(degree, costs, bool(token_nodes), routing_of(graph, degree))
        self._token_nodes = token_nodes
        self._has_experts = bool(routed_products(graph))
        self.active = _with_gradient(graph) if trains else frozenset[str]()
        self._read(graph)
        self._ways = {node.name: self._rules(node) for node in graph.nodes}

    def _read(self, graph: Graph) -> None:
        self.graph = graph
        self.active &= graph.types.keys()
        self._saved_reads: frozenset[tuple[str, int]] = frozenset()
        if self._token_nodes:
            self._saved_reads = saved_reads(graph, self.active)
        self._last = _last_readers(graph)

    def where_free(self, free: frozenset[tuple[str, str]]) -> Planner:
        """Return the planner if some messages, by direction and kind, have no startup cost."""
        other = copy.copy(self)
        other.paths = self.paths.where_free(free)
        return other

    def by(self, costs: LayerCosts) -> Planner:
        other = copy.copy(self)
        other.costs = costs
        other.paths = ReshardPaths(self.degree, costs, self.paths.shards_tokens, self.paths.routing)
        other._ways = {node.name: other._rules(node) for node in self.graph.nodes}
        return other

    def with_prices(self, prices: Mapping[str, Mapping[Sharding, float]]) -> Planner:
        """Return the planner with extra costs of some rules of nodes, by the node's name."""
        other = copy.copy(self)
        other._ways = {
            name: {rule: cost + prices.get(name, {}).get(rule, 0.0) for rule, cost in ways.items()}
            for name, ways in self._ways.items()
        }
        return other

    def ways(self, name: str) -> Collection[Sharding]:
        return self._ways[name].keys()

    def of(self, graph: Graph) -> Planner:
        """Return the planner of a graph with at most these nodes, and inputs of the same types."""
        other = copy.copy(self)
        other._read(graph)
        return other

    def plan(self, fixed: Constraints = _FREE) -> ParallelPlan:
        """Return the cheapest plan under constraints, without coalescing of messages.

        Raises:
            TypeCheckError: no rule of an operator takes its inputs in reachable layouts; names the
                operator, the layouts, and its possible layouts.
        """
        versions = {
            value.name: self.paths.made(value.type, fixed.inputs.get(value.name, WHOLE))
            for value in self.graph.inputs
        }
        states = [_State(versions, (0.0, 0))]
        for place, node in enumerate(self.graph.nodes):
            by_key: dict[tuple[frozenset[Layout], ...], _State] = {}
            for state in states:
                for new in self._after(state, place, node, fixed):
                    key = tuple(new.versions.values())
                    if key not in by_key or new.cost < by_key[key].cost:
                        by_key[key] = new
            if not by_key:
                raise TypeCheckError(self._refusal(node, states[0], fixed))
            states = self._undominated(by_key.values(), fixed)
        ends = [end for state in states if (end := self._ended(state, fixed)) is not None]
        if not ends:
            wanted = ", ".join(map(str, self._outputs(fixed)))
            raise TypeCheckError(f"outputs of {self.graph.name} cannot be brought into {wanted}")
        node_plans: list[NodePlan] = []
        at: _State | None = min(ends, key=lambda state: state.cost)
        while at is not None and at.node_plan is not None:
            node_plans.append(at.node_plan)
            at = at.parent
        outputs, *rest = node_plans
        names = (node.name for node in self.graph.nodes)
        nodes = dict(zip(names, reversed(rest), strict=True))
        return ParallelPlan(nodes, outputs, fixed.inputs)

    # ------------------------------------------------------------------------------------- a node

    def _rules(self, node: Node) -> dict[Sharding, float]:
        """Return the rules of a node with equal parts, with the cost of its work on a rank."""
        types, outputs = self.graph.types_of(node)
        needs = tuple(name in self.active for name in node.inputs)
        takes_all = node.name not in self._token_nodes
        rules: dict[Sharding, float] = {}
        every = list(operator(node.op).shardings(types, dict(node.attributes)))
        if self._has_experts:
            every += shared_rules(node, types, outputs, every, self.degree)
        for rule in every:
            held = (*zip(types, rule.inputs, strict=True), *zip(outputs, rule.outputs, strict=True))
            if takes_all and any(at.dim and at == token_part(type_) for type_, at in held):
                continue
            if all(self.paths.fits(type_, layout) for type_, layout in held):
                rules[rule] = self.costs.node(node, self.graph, rule, needs)
        return rules

    def _after(self, state: _State, place: int, node: Node, fixed: Constraints) -> Iterator[_State]:
        only = fixed.rules.get(node.name)
        ways = self._ways[node.name]
        for rule in ways if only is None else ways.keys() & {only}:
            work = ways[rule]
            for versions, built in self._brought(state, node, rule, fixed):
                for value, layout in zip(node.outputs, rule.outputs, strict=True):
                    versions[value.name] = self.paths.made(value.type, layout)
                for name in self._last.get(place, ()):
                    versions.pop(name, None)
                yield built.state_after(state, versions, rule, work)

    def _brought(
        self, state: _State, node: Node, rule: Sharding, fixed: Constraints
    ) -> Iterator[tuple[Versions, _NodePlanBuilder]]:
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
            built = _NodePlanBuilder()
            for name, layout in zip(names, holding, strict=True):
                versions[name] = frozenset([layout])
                built.held.append((name, layout))
                copies = self.graph.parameters_by_name[name].copies
                if name in self.active and (layout == REPLICATED or copies > 1):
                    type_ = self.graph.types[name]
                    if copies > 1:
                        rows, *rest = type_.shape
                        type_ = type_.with_shape((rows // copies, *rest))
                    built.cost += self.costs.sum_gradient(type_)
                    built.step_bytes += self.costs.bytes_sent("all_reduce", type_)
            if self._bring(versions, *self._wanted(node, rule), built, fixed):
                yield versions, built

    def _wanted(self, node: Node, rule: Sharding) -> tuple[Sequence[str], Sequence[Layout]]:
        """Return the inputs of a node, with the required layout of each."""
        if not self._saved_reads:
            return node.inputs, rule.inputs
        names, layouts = list(node.inputs), list(rule.inputs)
        for index, (name, layout) in enumerate(zip(node.inputs, rule.inputs, strict=True)):
            is_read = (node.name, index) in self._saved_reads
            if is_read and self.paths.is_marked(self.graph.types[name], layout):
                names.append(name)
                layouts.append(saved(layout))
        return names, layouts

    def _bring(
        self,
        versions: Versions,
        names: Sequence[str],
        layouts: Sequence[Layout],
        built: _NodePlanBuilder,
        fixed: Constraints,
    ) -> bool:
        wanted = dict.fromkeys(zip(names, layouts, strict=True))
        # An all-to-all of rows reads the indices of experts.
        for name, layout in sorted(wanted, key=lambda item: self.graph.types[item[0]].is_float):
            if name not in versions or layout in versions[name]:
                continue
            path = self._path(name, versions[name], layout, fixed)
            if path is None:
                return False
            cost, reshards = path
            versions[name] = self.paths.after(self.graph.types[name], versions[name], reshards)
            built.reshards.append((name, reshards))
            built.cost += cost
        return True

    def _path(
        self, name: str, have: frozenset[Layout], wanted: Layout, fixed: Constraints
    ) -> Path | None:
        if wanted in have:
            return 0.0, ()
        if name in fixed.direct:
            return None
        return self.paths.path(self.graph.types[name], name in self.active, have, wanted)

    def _holdings(self, parameter: Parameter, wanted: Layout, fixed: Constraints) -> list[Layout]:
        """Return an adapter weight's layouts from which a node can read the wanted layout."""
        name = parameter.name
        only = fixed.layouts.get(name)
        if wanted == PRE_REDUCE:
            return []  # a part among zeros equals the part
        if only is not None:
            is_reached = self._path(name, frozenset([only]), wanted, fixed) is not None
            return [only] if is_reached else []
        if wanted in (WHOLE, REPLICATED) and name not in fixed.direct:
            return [wanted, *self.paths.parts(parameter.type)]
        return [wanted]

    def _ended(self, state: _State, fixed: Constraints) -> _State | None:
        versions, built = dict(state.versions), _NodePlanBuilder()
        layouts = self._outputs(fixed)
        if not self._bring(versions, self.graph.outputs, layouts, built, fixed):
            return None
        return built.state_after(state, versions, Sharding(layouts, ()))

    def _outputs(self, fixed: Constraints) -> tuple[Layout, ...]:
        return tuple(fixed.outputs.get(name, WHOLE) for name in self.graph.outputs)

    # ------------------------------------------------------------------------------------- states

    def _undominated(self, states: Collection[_State], fixed: Constraints) -> list[_State]:
        """Return the states whose layouts no cheaper state reaches at the same cost."""
        additions = [
            self.paths.additions(self.graph.types[name], name in self.active, name in fixed.direct)
            for name in next(iter(states)).versions
        ]
        remaining: list[tuple[tuple[frozenset[Layout], ...], _State]] = []
        for state in sorted(states, key=lambda state: state.cost):
            layouts = tuple(state.versions.values())
            for have, other in remaining:
                if _reaches(other.cost, have, layouts, state.cost, additions):
                    break
            else:
                remaining.append((layouts, state))
            if len(remaining) == _WIDTH:
                break
        return [state for _, state in remaining]

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


def _reaches(
    cost: tuple[float, int],
    have: Iterable[frozenset[Layout]],
    wanted: Iterable[frozenset[Layout]],
    limit: tuple[float, int],
    additions: Iterable[_Additions],
) -> bool:
    """Return whether values in `have`, at a cost, can also be in `wanted` within a limit."""
    total, count = cost
    for had, layouts, added in zip(have, wanted, additions, strict=True):
        if had is not layouts:
            more, reshards = added[had, layouts]
            total, count = total + more, count + reshards
            if total > limit[0]:
                return False
    return (total, count) <= limit


def _may_be(fixed: Layout | None, layout: Layout) -> bool:
    """Return whether a frozen weight fits a constraint; without gradients `-` and `=` are equal."""
    if fixed is None:
        return True
    return layout in (WHOLE, REPLICATED, PRE_REDUCE) if fixed == WHOLE else layout == fixed


def _with_gradient(graph: Graph) -> frozenset[str]:
    """Return values with a gradient: carried inputs of a layer, and values that adapters reach."""
    carried = (value.name for value in graph.inputs[: len(graph.outputs)])
    return reachable(graph, (*carried, *trained(graph)))


def _last_readers(graph: Graph) -> dict[int, list[str]]:
    """Return values by the index of their last reader; the last index for outputs."""
    last: dict[str, int] = {}
    for place, node in enumerate(graph.nodes):
        last |= dict.fromkeys((*node.inputs, *(value.name for value in node.outputs)), place)
    names: dict[int, list[str]] = {}
    for name, place in last.items():
        if name not in graph.outputs:
            names.setdefault(place, []).append(name)
    return names
