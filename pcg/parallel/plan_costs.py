"""What a layer costs by a plan, with neighbours in one message, and what bypass networks add.

A bypass network adds what the layer costs with it, less what it costs without: the same layer where
what the network adds to stands in the place of what it makes, with all other nodes run alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from pcg.ir.graph import Graph
from pcg.parallel.coalescing import messages
from pcg.parallel.parallel_plan import Constraints, Cost, ParallelPlan
from pcg.parallel.planner import Planner


class PlanCosts:
    """The bills of one layer's plans.

    Args:
        planner: of the layer.
        given: layouts of the base's weights and of the layer's ends, and adapters' weights that all
            read as they are held.
    """

    def __init__(self, planner: Planner, given: Constraints) -> None:
        self.planner = planner
        self._given = given
        self._without: dict[object, tuple[ParallelPlan, Cost]] = {}
        self._planners: dict[frozenset[str], Planner] = {}

    def of(self, plan: ParallelPlan) -> Cost:
        """What a plan costs."""
        return _bill(self.planner, plan)

    def without(self, plan: ParallelPlan, nodes: Collection[str]) -> Cost:
        """What a plan costs without some bypass networks, of which these are the nodes."""
        left_out = frozenset(nodes)
        known = self._without.get((id(plan), left_out))
        if known is None or known[0] is not plan:
            known = self._without[id(plan), left_out] = (plan, self._less(plan, left_out))
        return known[1]

    def _less(self, plan: ParallelPlan, nodes: frozenset[str]) -> Cost:
        if nodes not in self._planners:
            self._planners[nodes] = self.planner.of(_without(self.planner.graph, nodes))
        planner = self._planners[nodes]
        rules = {name: choice.rule for name, choice in plan.choices.items() if name not in nodes}
        known = planner.graph.parameters_by_name
        held = {name: layout for name, layout in plan.held.items() if name in known}
        given = self._given
        ends = zip(planner.graph.outputs, self.planner.graph.outputs, strict=True)
        outputs = {here: given.outputs[there] for here, there in ends if there in given.outputs}
        layouts = {**given.layouts, **held}
        fixed = dataclasses.replace(given, layouts=layouts, rules=rules, outputs=outputs)
        return _bill(planner, planner.plan(fixed))


def _bill(planner: Planner, plan: ParallelPlan) -> Cost:
    costs, total = planner.costs, plan.total
    sent = messages(planner.graph, plan, planner.degree, planner.active)
    alone = sum(
        planner.send(step, planner.graph.types[name], name in planner.active)
        for choice in (*plan.choices.values(), plan.outputs)
        for name, steps in choice.steps
        for step in steps
    )
    forward, backward = (
        sum(costs.bytes_sent(message.kind, *message.types) for message in some)
        for some in (sent.forward, sent.backward)
    )
    together = sum(costs.send(m.kind, *m.types) for m in (*sent.forward, *sent.backward))
    return Cost(
        total.cost - alone + together,
        forward,
        backward,
        total.step_bytes,
        len(sent.forward),
        len(sent.backward),
    )


def _without(graph: Graph, nodes: Collection[str]) -> Graph:
    """The graph without bypass networks: what each adds to in the place of what it makes."""
    names: dict[str, str] = {}
    kept = []
    for node in graph.nodes:
        inputs = tuple(names.get(name, name) for name in node.inputs)
        if node.name in nodes:
            names |= {value.name: inputs[0] for value in node.outputs}
        else:
            kept.append(dataclasses.replace(node, inputs=inputs))
    outputs = tuple(names.get(name, name) for name in graph.outputs)
    return graph.replace(nodes=tuple(kept), outputs=outputs).without_dead_code()
