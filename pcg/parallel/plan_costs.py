"""The cost of a layer's plans with neighbouring messages coalesced, and of its bypass networks.

A bypass network costs what the layer costs with it, less what it costs without: the same layer
where the value that the network adds to stands for what it makes, with all other nodes run alike.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from pcg.ir.graph import Graph
from pcg.parallel.coalescing import Message, plan_messages
from pcg.parallel.parallel_plan import Constraints, Cost, ParallelPlan
from pcg.parallel.planner import Planner


class PlanCosts:
    """The costs of one layer's plans, with what is given of all of them."""

    def __init__(self, planner: Planner, given: Constraints) -> None:
        self.planner = planner
        self._given = given
        self._without: dict[object, tuple[ParallelPlan, Cost]] = {}
        self._planners: dict[frozenset[str], Planner] = {}

    def of(self, plan: ParallelPlan) -> Cost:
        return _cost(self.planner, plan)

    def without(self, plan: ParallelPlan, nodes: Collection[str]) -> Cost:
        """The cost of a plan without the bypass networks that have these nodes."""
        left_out = frozenset(nodes)
        known = self._without.get((id(plan), left_out))
        if known is None or known[0] is not plan:
            known = self._without[id(plan), left_out] = (plan, self._less(plan, left_out))
        return known[1]

    def _less(self, plan: ParallelPlan, nodes: frozenset[str]) -> Cost:
        if nodes not in self._planners:
            self._planners[nodes] = self.planner.of(_without(self.planner.graph, nodes))
        planner = self._planners[nodes]
        given, graph = self._given, planner.graph
        rules = {name: rule for name, rule in plan.rules.items() if name not in nodes}
        held = {name: at for name, at in plan.held.items() if name in graph.parameters_by_name}
        ends = zip(graph.outputs, self.planner.graph.outputs, strict=True)
        outputs = {here: given.outputs[there] for here, there in ends if there in given.outputs}
        layouts = {**given.layouts, **held}
        fixed = replace(given, layouts=layouts, rules=rules, outputs=outputs)
        return _cost(planner, planner.plan(fixed))


def _cost(planner: Planner, plan: ParallelPlan) -> Cost:
    costs = planner.costs
    forward, backward = plan_messages(planner.graph, plan, planner.degree, planner.active)
    alone = sum(
        planner.paths.send(reshard, planner.graph.types[name], name in planner.active)
        for node_plan in (*plan.nodes.values(), plan.outputs)
        for name, reshards in node_plan.reshards
        for reshard in reshards
    )
    together = sum(costs.send(one.kind, *one.types) for one in (*forward, *backward))

    def sent(messages: Sequence[Message]) -> int:
        return sum(costs.bytes_sent(one.kind, *one.types) for one in messages)

    step_bytes = sum(node_plan.step_bytes for node_plan in plan.nodes.values())
    bytes_ = (sent(forward), sent(backward), step_bytes)
    return Cost(plan.cost - alone + together, *bytes_, len(forward), len(backward))


def _without(graph: Graph, nodes: Collection[str]) -> Graph:
    """The graph without bypass networks: what each adds to in the place of what it makes."""
    names: dict[str, str] = {}
    remaining = []
    for node in graph.nodes:
        inputs = tuple(names.get(name, name) for name in node.inputs)
        if node.name in nodes:
            names |= {value.name: inputs[0] for value in node.outputs}
        else:
            remaining.append(replace(node, inputs=inputs))
    outputs = tuple(names.get(name, name) for name in graph.outputs)
    return graph.replace(nodes=tuple(remaining), outputs=outputs).without_dead_code()
