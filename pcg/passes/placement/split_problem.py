"""The split problem: the side and the round trip of each node of a graph.

A base executor holds the frozen weights and keeps nothing between two calls; a client holds the
rest (Symbiosis §3). A call runs a *piece* at the base, over values that the client sends, and
returns values to the client. With A the values at the client, a round trip is

    A -> A + F      latency + Σ up(s), s in S  +  Σ base(n), n in P  +  Σ down(f), f in F

where P computes F, and each value that P reads is computed in P, sent (S ⊆ A), or a frozen weight.
The client runs a node whose inputs it has: A -> A + n at client(n). A node may run several times,
in several pieces or on both sides, if that is cheaper than a transfer of its result. The cut is the
cheapest way from the graph's inputs to its outputs.

    client   reads an adapter or values computed only from adapters, sees sequences (attention and
             its cache), draws random numbers, or reads targets
    base     reads a frozen weight of at least two dims, and is not a client's node
    either   all others: norms, activations, sums; both sides hold their vectors

Values are numbered; sets of nodes and of values are bit masks.

Times of a split step combine two devices, each with its cost model, and their link.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from pcg.ir.graph import Graph, Node
from pcg.ir.types import TensorType
from pcg.options import SplitLink
from pcg.parallel.costs.cost_model import PICOSECOND, CostModel
from pcg.parallel.costs.work import is_free, with_rank
from pcg.parallel.costs.work import size_bytes as bytes_of


class Side(enum.Enum):
    """The sides on which a node may run."""

    CLIENT = "client"
    BASE = "base"
    EITHER = "either"


@dataclass(frozen=True)
class SplitNode:
    """A node, with its times on both sides in picoseconds.

    Attributes:
        side: the side or sides that can run the node.
        reads: the numbers of the values that it reads, except weights.
        makes: the numbers of the values that it computes.
    """

    name: str
    side: Side
    base_ps: int
    client_ps: int
    reads: tuple[int, ...]
    makes: tuple[int, ...]


@dataclass(frozen=True)
class SplitValue:
    """A value, with its size and the times to send and to return it, in picoseconds."""

    name: str
    size_bytes: int
    up_ps: int
    down_ps: int


@dataclass(frozen=True)
class SplitProblem:
    """Nodes in order, over values; values without a maker are at the client from the start.

    Attributes:
        outputs: the numbers of the values that the client wants.
        latency_ps: time of each round trip, without transfers and nodes.
    """

    nodes: tuple[SplitNode, ...]
    values: tuple[SplitValue, ...]
    outputs: tuple[int, ...]
    latency_ps: int

    @cached_property
    def makers(self) -> dict[int, int]:
        return {value: n for n, node in enumerate(self.nodes) for value in node.makes}

    @cached_property
    def readers(self) -> tuple[int, ...]:
        masks = [0] * len(self.values)
        for number, node in enumerate(self.nodes):
            for value in node.reads:
                masks[value] |= 1 << number
        return tuple(masks)

    @cached_property
    def before(self) -> tuple[int, ...]:
        makers = self.makers
        return tuple(
            mask_of(makers[value] for value in node.reads if value in makers) for node in self.nodes
        )

    @cached_property
    def client_only(self) -> int:
        return mask_of(n for n, node in enumerate(self.nodes) if node.side is Side.CLIENT)

    @cached_property
    def wanted(self) -> int:
        """The values that the client always needs: outputs, and inputs of its own nodes."""
        client_nodes = (node for node in self.nodes if node.side is Side.CLIENT)
        return mask_of(self.outputs) | mask_of(
            value for node in client_nodes for value in node.reads
        )

    @cached_property
    def eager(self) -> int:
        """The nodes that the client runs as soon as it can.

        These are the nodes that the base cannot run, and nodes that compute values that the client
        always needs, from values that it always has, in less time than a return takes. The base may
        also run the latter.
        """
        makers, eager = self.makers, self.client_only
        for number, node in enumerate(self.nodes):
            if node.side is Side.EITHER and all(self.wanted >> v & 1 for v in node.makes):
                has = all(
                    v not in makers or eager >> makers[v] & 1 or self.wanted >> v & 1
                    for v in node.reads
                )
                if has and node.client_ps <= sum(self.values[v].down_ps for v in node.makes):
                    eager |= 1 << number
        return eager

    def made_by(self, nodes: int) -> int:
        return mask_of(value for n in bits(nodes) for value in self.nodes[n].makes)

    def read_by(self, nodes: int) -> int:
        """Return the inputs of some nodes that none of them computes."""
        read = mask_of(value for n in bits(nodes) for value in self.nodes[n].reads)
        return read & ~self.made_by(nodes)

    def closed(self, ran: int) -> int:
        """Add all eager nodes that can run after the given nodes."""
        for number in bits(self.eager & ~ran):
            if not self.before[number] & ~ran:
                ran |= 1 << number
        return ran


def mask_of(numbers: Iterable[int]) -> int:
    """Return the mask of some numbers."""
    mask = 0
    for number in numbers:
        mask |= 1 << number
    return mask


def bits(mask: int) -> Iterator[int]:
    """Yield the numbers of a mask in ascending order."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


# -------------------------------------------------------------------------------------- split costs


@dataclass(frozen=True)
class SplitCosts:
    """Picoseconds of nodes on both sides, and of transfers.

    Attributes:
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
        return round(self.link.latency_s / PICOSECOND)

    def size_bytes(self, type_: TensorType) -> int:
        return bytes_of(type_, self.tokens)

    def send_ps(self, size_bytes: int) -> int:
        return round(size_bytes / self.link.bytes_per_s / PICOSECOND)

    def node_ps(self, graph: Graph, node: Node, side: Side) -> tuple[int, int]:
        """Return a node's times at the base and at the client; 0 for views and excluded sides.

        Raises:
            CostModelError: a device has no cost for the node.
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
