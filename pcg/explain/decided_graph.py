"""The forward graph of one layer for a report: without weights and views, with decisions."""

from __future__ import annotations

from pcg.explain.decisions import decisions
from pcg.explain.report_data import GraphNode
from pcg.ir.analysis.storages import Storages
from pcg.ir.program.program import TrainingGraph
from pcg.passes.differentiate import LayerKind


def decided_graph(kind: LayerKind, plan: TrainingGraph) -> tuple[GraphNode, ...]:
    """Return the inputs and nodes of a layer's forward, in order, with decisions on their tensors.

    Views are not listed: their readers read what they are views of.

    Args:
        kind: the kind of layer.
        plan: the layer's training graphs.
    """
    graph = plan.forward
    storages = Storages.of(graph)
    decided = {
        row.tensor.partition(".")[2]: row.decision for row in decisions(kind, plan, layers=1)
    }
    used = {storages[name].name for node in graph.nodes for name in node.inputs}
    found = [
        GraphNode(value.name, "input", "", (), decided[value.name])
        for value in graph.inputs
        if value.name in used
    ]
    makers = {value.name: node.name for node in graph.nodes for value in node.outputs}
    for node in graph.nodes:
        if storages[node.name].name != node.name:
            continue
        roots = [storages[name] for name in node.inputs]
        read = [makers.get(root.name, root.name) for root in roots if not root.is_parameter]
        inputs = tuple(dict.fromkeys(read))
        found.append(GraphNode(node.name, node.op, node.scope, inputs, decided[node.name]))
    return tuple(found)
