"""Times of a split step: a link between two devices, each with its cost model."""

from __future__ import annotations

from dataclasses import dataclass

from pcg.ir.graph import Graph, Node
from pcg.ir.types import TensorType
from pcg.options import SplitLink
from pcg.parallel.costs.cost_model import CostModel
from pcg.parallel.costs.rank_costs import PICOSECOND
from pcg.parallel.costs.work import is_free, with_rank
from pcg.parallel.costs.work import size_bytes as bytes_of
from pcg.passes.placement.split_problem import Side


@dataclass(frozen=True)
class SplitCosts:
    """Picoseconds of nodes on either side, and of values between them.

    Attributes:
        base: the cost model of the base's device.
        client: that of the client's.
        link: the link between them.
        tokens: the number of tokens of a step.
        context: the number of tokens of a sequence.
    """

    base: CostModel
    client: CostModel
    link: SplitLink
    tokens: int
    context: int

    @property
    def latency_ps(self) -> int:
        """Time of a round trip that carries nothing."""
        return round(self.link.latency_s / PICOSECOND)

    def size_bytes(self, type_: TensorType) -> int:
        """Bytes of a value of the step."""
        return bytes_of(type_, self.tokens)

    def send_ps(self, size_bytes: int) -> int:
        """Time of so many bytes in one direction."""
        return round(size_bytes / self.link.bytes_per_s / PICOSECOND)

    def node_ps(self, graph: Graph, node: Node, side: Side) -> tuple[int, int]:
        """Times of a node at the base and at the client; nothing of a view, nor where it never is.

        Raises:
            CostModelError: a device has no cost for it.
        """
        if is_free(node.op):
            return 0, 0
        at_base = 0 if side is Side.CLIENT else self._node_ps(self.base, graph, node)
        return at_base, 0 if side is Side.BASE else self._node_ps(self.client, graph, node)

    def _node_ps(self, model: CostModel, graph: Graph, node: Node) -> int:
        inputs = tuple(with_rank(graph.types[name]) for name in node.inputs)
        outputs = tuple(with_rank(value.type) for value in node.outputs)
        attributes = dict(node.attributes)
        seconds = model.operator_seconds(
            node.op, inputs, outputs, attributes, self.tokens, self.context
        )
        return round(seconds / PICOSECOND)
