"""Costs of a layer's nodes and messages on ranks: bytes, seconds on a device, or a mix of steps.

A serving program decodes a token of each sequence and reads prompts with the same layouts. The
cheapest plan for a prompt of thousands of tokens, for example with a sum over the ranks in place of
a product, may cost a third of a decode step. A serving plan is therefore chosen for a mix of steps:

    cost = Σ over steps   seconds of the plan there / seconds of the base alone there

Each term is relative to the step's own time, so that no step dominates by its size.

`Exchange` counts the messages of a rank's graph. The counts are exact: the collectives of the
emitted program, including those that a memory plan repeats in backward, and messages that operators
exchange internally.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import sympy

from pcg.ir.analysis.builder import Builder
from pcg.ir.graph import Attribute, Graph, Node, Value
from pcg.ir.layouts import Layout, Sharding, local_type, partitioned, parts_of_experts
from pcg.ir.operators import operator
from pcg.ir.operators.base import Attributes, Gradient, Types
from pcg.ir.operators.collectives import FLOPS_PER_BYTE
from pcg.ir.types import CONTEXT, TOKENS, TensorType
from pcg.parallel.costs.cost_model import CostModel, message_of
from pcg.parallel.costs.work import OPEN_RANK, size_bytes, with_rank

# -------------------------------------------------------------------------------------- layer costs


CONTEXT_TOKENS = 1024
"""Tokens that a token attends to, in serving steps and without a known device."""


class LayerCosts(ABC):
    """Costs of nodes and messages over `degree` ranks in a step of `tokens`, in a common unit."""

    def __init__(self, degree: int, tokens: int) -> None:
        self.degree = degree
        self.tokens = tokens

    @abstractmethod
    def node(self, node: Node, graph: Graph, rule: Sharding, needs: tuple[bool, ...]) -> float:
        """Return the cost on a rank of a node of a graph of whole tensors, and of its gradients.

        `needs` marks the inputs that need a gradient.
        """

    @abstractmethod
    def send(self, kind: str, *types: TensorType) -> float:
        """Return the cost of a message: a sum of tensors, or a gather to whole tensors.

        Without tensors, the message is empty.
        """

    def place(self, type_: TensorType, dim: int) -> float:
        """Return the cost of writing a rank's part of a whole tensor among zeros."""
        return 0.0

    def sum_gradient(self, type_: TensorType) -> float:
        """Return a batch's share of summing an adapter weight's gradient over the ranks."""
        return 0.0

    def message_bytes(self, types: Iterable[TensorType]) -> int:
        return sum(size_bytes(type_, self.tokens) for type_ in types)

    def bytes_sent(self, kind: str, *types: TensorType) -> int:
        return ring_bytes(kind, self.message_bytes(types), self.degree)


class ByteCosts(LayerCosts):
    """Bytes between ranks per token, and a byte for every FLOPS_PER_BYTE operations.

    Operations count, as all ranks run a product of whole tensors. No device is known: the base's
    plan is the same on all devices. The unit is an operation of all ranks, so that sums are
    integers, and plans of equal cost compare as equal.

    With token shards, costs are those of a token on each rank, and all operators count: otherwise a
    norm over all tokens would cost the same.
    """

    def __init__(self, degree: int, shards_tokens: bool = False) -> None:
        super().__init__(degree, degree if shards_tokens else 1)
        self._shards_tokens = shards_tokens

    def node(self, node: Node, graph: Graph, rule: Sharding, needs: tuple[bool, ...]) -> float:
        entry = operator(node.op)
        if not entry.is_product and not self._shards_tokens:
            return 0.0
        types, outputs = graph.types_of(node)
        flops = entry.flops(types, outputs, dict(node.attributes))
        is_sharded = any(layout.cuts(self.degree) for layout in rule.inputs)
        return _number(flops, self.tokens) * (1 if is_sharded else self.degree)

    def send(self, kind: str, *types: TensorType) -> float:
        return float(FLOPS_PER_BYTE * self.degree * self.bytes_sent(kind, *types))


class DeviceCosts(LayerCosts):
    """Seconds of a layer's forward and backward on a rank.

    Args:
        context: the number of tokens that a token attends to.
        gradient_accumulation_steps: batches per optimizer step, which share the sums of gradients.
    """

    def __init__(
        self,
        model: CostModel,
        degree: int,
        tokens: int,
        context: int,
        gradient_accumulation_steps: int = 1,
    ) -> None:
        super().__init__(degree, tokens)
        self.model = model
        self.context = context
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self._known: dict[object, float] = {}

    def node(self, node: Node, graph: Graph, rule: Sharding, needs: tuple[bool, ...]) -> float:
        ins, outs = map(self._held, graph.types_of(node), (rule.inputs, rule.outputs))
        parts = parts_of_experts(rule.inputs, self.degree)
        key = (rule.op or node.op, ins, outs, node.attributes, needs, parts)
        if key not in self._known:
            attributes = operator(key[0]).local_attributes(dict(node.attributes), outs, parts)
            seconds = self._seconds(key[0], ins, outs, attributes)
            if any(needs) and outs[0].is_float:
                local = backward_of(key[0], ins, outs, attributes, needs)
                seconds += sum(self._node_seconds(local, local_node) for local_node in local.nodes)
            self._known[key] = seconds
        return self._known[key]

    def send(self, kind: str, *types: TensorType) -> float:
        return self.model.collective_seconds(kind, self.message_bytes(types), self.degree)

    def place(self, type_: TensorType, dim: int) -> float:
        whole = with_rank(type_)
        part = local_type(whole, partitioned(dim), self.degree)
        return self._seconds("placed_part", (part,), (whole,), {"dim": dim, "degree": self.degree})

    def sum_gradient(self, type_: TensorType) -> float:
        """Return a batch's share of the bytes' time; all gradients share a single message."""
        size = size_bytes(type_, self.tokens)
        seconds = self.model.collective_seconds
        once, twice = (seconds("all_reduce", times * size, self.degree) for times in (1, 2))
        return (twice - once) / self.gradient_accumulation_steps

    def _held(self, types: Sequence[TensorType], layouts: Sequence[Layout]) -> Types:
        pairs = zip(types, layouts, strict=True)
        return tuple(local_type(with_rank(type_), layout, self.degree) for type_, layout in pairs)

    def _node_seconds(self, graph: Graph, node: Node) -> float:
        ins, outs = graph.types_of(node)
        return self._seconds(node.op, ins, outs, dict(node.attributes))

    def _seconds(self, op: str, ins: Types, outs: Types, attributes: Attributes) -> float:
        if operator(op).is_view:
            return 0.0
        return self.model.operator_seconds(op, ins, outs, attributes, self.tokens, self.context)


def ring_bytes(kind: str, size: int, degree: int) -> int:
    """Bytes that a rank sends: in an `all_reduce` 2 (n - 1) / n, in others (n - 1) / n."""
    return (2 if kind == "all_reduce" else 1) * size * (degree - 1) // degree


@lru_cache(maxsize=65536)
def _number(formula: sympy.Expr, tokens: int) -> float:
    known = {TOKENS: tokens, CONTEXT: CONTEXT_TOKENS}
    free = sympy.sympify(formula).free_symbols
    return float(formula.subs({symbol: known.get(symbol, OPEN_RANK) for symbol in free}))


def backward_of(
    op: str, ins: Types, outs: Types, attributes: Attributes, needs: tuple[bool, ...]
) -> Graph:
    """Return an operator's gradient: a graph of inputs `i0`, …, outputs `o0`, …, gradient `d`."""
    values = tuple(Value(f"i{i}", type_) for i, type_ in enumerate(ins))
    outputs = tuple(Value(f"o{i}", type_) for i, type_ in enumerate(outs))
    pairs: tuple[tuple[str, Attribute], ...] = tuple(sorted(attributes.items()))
    node = Node(op, tuple(value.name for value in values), outputs, pairs)
    graph = Graph("one", values, (), (node,), (outputs[0].name,))
    builder = Builder("backward")
    incoming = builder.input("d", outs[0])
    upstream = (incoming, *(None,) * (len(outs) - 1))
    gradients = operator(op).gradient(Gradient(builder, graph, node, upstream, needs))
    return builder.build([name for name in gradients if name is not None])


# -------------------------------------------------------------------------------------- mixed costs


DECODE_TOKENS = (1, 4, 16, 64, 256)
"""Tokens of the decode steps: one of each sequence."""
PREFILL_TOKENS = 2048
"""Tokens of the prefill step."""
SERVING_TOKENS = (*DECODE_TOKENS, PREFILL_TOKENS)


class MixedCosts(LayerCosts):
    """Weighted costs of a layer's forward over several steps; bytes are those of the first."""

    def __init__(self, steps: Sequence[tuple[float, DeviceCosts]]) -> None:
        first = steps[0][1]
        super().__init__(first.degree, first.tokens)
        self._steps = steps

    def node(self, node: Node, graph: Graph, rule: Sharding, needs: tuple[bool, ...]) -> float:
        return sum(weight * step.node(node, graph, rule, needs) for weight, step in self._steps)

    def send(self, kind: str, *types: TensorType) -> float:
        return sum(weight * step.send(kind, *types) for weight, step in self._steps)

    def place(self, type_: TensorType, dim: int) -> float:
        return sum(weight * step.place(type_, dim) for weight, step in self._steps)


# ----------------------------------------------------------------------------------------- exchange


_WITHIN: Mapping[str, tuple[str, ...]] = {
    "column_norm_part": ("all_reduce",),
    "cross_entropy_part": ("all_reduce", "all_gather"),
    "cross_entropy_part_backward": ("all_gather",),
}
"""Kinds of operators' internal messages, of one number a token or a row."""
_OF_PARTS: Mapping[str, tuple[str, ...]] = {
    "attention": ("all_gather",),
    "attention_backward": ("all_gather", "reduce_scatter"),
}
"""Kinds of operators' internal messages of keys and values, if ranks have parts of the tokens."""


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
        """Return the messages of a rank's graph; `among` restricts them to these values."""
        exchange = cls()
        for node in graph.nodes:
            for kind, sizes in _messages(graph, node, tokens, degree):
                wanted = [size for name, size in sizes.items() if among is None or name in among]
                if wanted:
                    exchange += cls(ring_bytes(kind, sum(wanted), degree), 1)
        return exchange

    @classmethod
    def of_parts(cls, graph: Graph, rows: int, degree: int) -> Exchange:
        """Return the messages of a graph between `degree` ranks with at most `rows` tokens each."""
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
    """Yield a node's messages: the kind, and bytes of the whole tensors by resulting value."""
    inputs, outputs = graph.types_of(node)
    names = [value.name for value in node.outputs]
    message = message_of(node, inputs, outputs)
    if message is not None:
        kind, wholes = message
        yield kind, {n: size_bytes(type_, tokens) for n, type_ in zip(names, wholes, strict=True)}
    for kind in _WITHIN.get(node.op, ()):
        # The gradient of a loss has as many numbers as the loss.
        row = inputs[0] if node.op.endswith("_backward") else outputs[0]
        whole = degree if kind == "all_gather" else 1
        yield kind, {names[0]: whole * size_bytes(row, tokens)}
