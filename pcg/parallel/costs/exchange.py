"""The messages of a rank's graph: their number and bytes.

These are not estimates: they are the collectives that the emitted program runs, including those
that a memory plan repeats in backward, and messages that operators exchange internally.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from pcg.ir.graph import Graph, Node
from pcg.ir.operators import operator
from pcg.parallel.costs.cost_model import message_of
from pcg.parallel.costs.layer_costs import ring_bytes
from pcg.parallel.costs.work import size_bytes

_WITHIN: Mapping[str, tuple[str, ...]] = {
    "column_norm_part": ("all_reduce",),
    "cross_entropy_part": ("all_reduce", "all_gather"),
    "cross_entropy_part_backward": ("all_gather",),
}
"""Kinds of the messages that operators send themselves, of one number a token, or a row."""
_OF_PARTS: Mapping[str, tuple[str, ...]] = {
    "attention": ("all_gather",),
    "attention_backward": ("all_gather", "reduce_scatter"),
}
"""Kinds of those that they send, of keys and values, where ranks have parts of the tokens."""


@dataclass(frozen=True)
class Exchange:
    """Messages that a rank sends, and their bytes."""

    size_bytes: int = 0
    messages: int = 0

    def __add__(self, other: Exchange) -> Exchange:
        return Exchange(self.size_bytes + other.size_bytes, self.messages + other.messages)

    @classmethod
    def of(
        cls, graph: Graph, tokens: int, degree: int, among: Collection[str] | None = None
    ) -> Exchange:
        """The messages of a rank's graph; with `among`, only the share that makes these values."""
        exchange = cls()
        for node in graph.nodes:
            for kind, sizes in _messages(graph, node, tokens, degree):
                wanted = [size for name, size in sizes.items() if among is None or name in among]
                if wanted:
                    exchange += cls(ring_bytes(kind, sum(wanted), degree), 1)
        return exchange

    @classmethod
    def of_parts(cls, graph: Graph, rows: int, degree: int) -> Exchange:
        """The messages of a graph among `degree` ranks with at most `rows` tokens of sequences."""
        exchange = cls()
        for node in graph.nodes:
            inputs = tuple(graph.types[name] for name in node.inputs)
            gathered = operator(node.op).context_inputs(inputs)
            size = degree * sum(size_bytes(type_, rows) for type_ in gathered)
            for kind in _OF_PARTS[node.op] if gathered else ():
                exchange += cls(ring_bytes(kind, size, degree), 1)
        return exchange


def _messages(
    graph: Graph, node: Node, tokens: int, degree: int
) -> Iterator[tuple[str, dict[str, int]]]:
    """The messages of a node: the kind, and bytes of the whole tensors by resulting value."""
    inputs, outputs = graph.types_of(node)
    names = [value.name for value in node.outputs]
    message = message_of(node, inputs, outputs)
    if message is not None:
        kind, wholes = message
        yield kind, {n: size_bytes(type_, tokens) for n, type_ in zip(names, wholes, strict=True)}
    for kind in _WITHIN.get(node.op, ()):
        # The gradient of a loss is of as many numbers as the loss.
        row = inputs[0] if node.op.endswith("_backward") else outputs[0]
        whole = degree if kind == "all_gather" else 1
        yield kind, {names[0]: whole * size_bytes(row, tokens)}
