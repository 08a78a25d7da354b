"""Shard a graph over the ranks of a tensor-parallel group, as a plan says.

The graph stays the same but for the layouts in its types and the parallelization operators between
them; a parameter that is read in two layouts is two parameters.
"""

from __future__ import annotations

from dataclasses import replace

from pcg.ir.analysis.builder import Builder
from pcg.ir.graph import Graph, Node, Parameter, Value
from pcg.ir.layouts import REPLICATED, WHOLE, Layout
from pcg.parallel.parallel_plan import NodePlan, ParallelPlan, Reshard, is_saved

_SUFFIX = {
    "combine": "joined",
    "gather": "gathered",
    "partition": "part",
    "place": "summand",
    "reduce": "sum",
    "replicate": "everywhere",
    "scatter": "scattered",
    "take": "taken",
}


def shard(graph: Graph, degree: int, plan: ParallelPlan) -> Graph:
    """The graph with layouts in its types, and the operators that change them."""
    return _Sharder(graph, degree, plan).run()


class _Sharder:
    def __init__(self, graph: Graph, degree: int, plan: ParallelPlan) -> None:
        self.graph = graph
        self.degree = degree
        self.plan = plan
        self.builder = Builder(graph.name)
        self.builder.reserved = graph.types
        self.versions: dict[str, dict[Layout, str]] = {}
        for value in graph.inputs:
            layout = plan.inputs.get(value.name, WHOLE)
            self.builder.input(value.name, layout.of(value.type, degree))
            self.versions[value.name] = {layout: value.name}

    def run(self) -> Graph:
        for node in self.graph.nodes:
            self._node(node, self.plan.nodes[node.name])
        self._bring(self.plan.outputs)
        outputs = zip(self.graph.outputs, self.plan.outputs.rule.inputs, strict=True)
        return self.builder.build([self.versions[name][layout] for name, layout in outputs])

    def _node(self, node: Node, node_plan: NodePlan) -> None:
        for name, layout in node_plan.held:
            self._hold(self.graph.parameters_by_name[name], layout)
        self._bring(node_plan)
        inputs = []
        for name, layout in zip(node.inputs, node_plan.rule.inputs, strict=True):
            parameter = self.graph.parameters_by_name.get(name)
            if parameter is not None and parameter.role != "adapter":
                # It has no gradient, so that whole and replicated are one.
                layout = REPLICATED if layout == WHOLE else layout
                if layout not in self.versions.get(name, {}):
                    self._hold(parameter, layout)
            inputs.append(self.versions[name][layout])
        outputs = []
        for value, layout in zip(node.outputs, node_plan.rule.outputs, strict=True):
            outputs.append(Value(value.name, layout.of(value.type, self.degree)))
            self.versions[value.name] = {layout: value.name}
        op = node_plan.rule.op or node.op
        self.builder.append(Node(op, tuple(inputs), tuple(outputs), node.attributes, node.scope))

    def _bring(self, node_plan: NodePlan) -> None:
        for name, reshards in node_plan.reshards:
            for reshard in reshards:
                if not is_saved(reshard.after) and reshard.after not in self.versions[name]:
                    self.versions[name][reshard.after] = self._transition(name, reshard)

    def _transition(self, name: str, reshard: Reshard) -> str:
        attributes = (("dim", reshard.dim),) if reshard.dim else ()
        made = self.builder.fresh(f"{name}_{_SUFFIX[reshard.op]}")
        value = Value(made, reshard.after.of(self.graph.types[name], self.degree))
        maker = self.graph.producers.get(name)
        scope = maker.scope if maker else ""
        source = self.versions[name][reshard.before]
        self.builder.append(Node(reshard.op, (source,), (value,), attributes, scope))
        return made

    def _hold(self, parameter: Parameter, layout: Layout) -> None:
        versions = self.versions.setdefault(parameter.name, {})
        name = parameter.name if not versions else self.builder.fresh(f"{parameter.name}_again")
        type_ = layout.of(parameter.type, self.degree)
        if parameter.role != "adapter" and layout == REPLICATED:
            type_ = parameter.type
        versions[layout] = self.builder.parameter(replace(parameter, value=Value(name, type_)))
