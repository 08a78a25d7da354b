"""Seconds of a rank's nodes on a device: what an operator computes, or a message exchanges."""

from __future__ import annotations

from dataclasses import dataclass

from pcg.ir.graph import Graph, Node
from pcg.ir.operators import operator
from pcg.ir.operators.base import Types
from pcg.ir.operators.collectives import Collective
from pcg.parallel.costs.cost_model import CostModel
from pcg.parallel.costs.work import is_free, size_bytes

PICOSECOND = 1e-12


@dataclass(frozen=True)
class RankCosts:
    """The costs of one rank's nodes, of `degree` ranks on a device."""

    model: CostModel
    degree: int

    def node_seconds(self, graph: Graph, node: Node, tokens: int, context: int) -> float:
        """Seconds of a node of a rank's graph, whose message goes by itself; 0 of a view.

        Args:
            tokens: the number of tokens of the step.
            context: the number of tokens of a sequence.
        Raises:
            CostModelError: no cost is known.
        """
        inputs = tuple(graph.types[name] for name in node.inputs)
        outputs = tuple(value.type for value in node.outputs)
        message = message_of(node, inputs, outputs)
        if message is not None:
            kind, wholes = message
            size = sum(size_bytes(type_, tokens) for type_ in wholes)
            return self.model.collective_seconds(kind, size, self.degree)
        if is_free(node.op):
            return 0.0
        attributes = dict(node.attributes)
        return self.model.operator_seconds(node.op, inputs, outputs, attributes, tokens, context)

    def graph_seconds(self, graph: Graph, tokens: int, context: int) -> float:
        """Seconds of a rank's graph, with nothing beside its messages."""
        return sum(self.node_seconds(graph, node, tokens, context) for node in graph.nodes)


def message_of(node: Node, inputs: Types, outputs: Types) -> tuple[str, Types] | None:
    """The kind and the whole tensors of the message that a node sends; None where it sends none.

    Several tensors go in one message, and a copy that is gathered is gathered as any.
    """
    entry = operator(node.op)
    if not isinstance(entry, Collective) or not entry.rounds:
        return None
    kind = "all_gather" if node.op == "gathered_copy" else node.op.removesuffix("s")
    return kind, inputs if kind == "reduce_scatter" else outputs
