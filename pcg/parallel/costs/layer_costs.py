"""What a layer costs on ranks: by bytes alone, or in seconds on a device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import sympy

from pcg.ir.builder import Builder
from pcg.ir.graph import Attribute, Graph, Node, Value
from pcg.ir.layouts import Layout, Sharding, local_type, partitioned
from pcg.ir.operators import operator
from pcg.ir.operators.base import Attributes, Gradient, Types
from pcg.ir.operators.collectives import FLOPS_PER_BYTE
from pcg.ir.types import CONTEXT, TOKENS, TensorType
from pcg.parallel.costs.cost_model import CostModel

CONTEXT_TOKENS = 1024
"""That a token attends to, where operations of attention are counted and no device is known."""

OPEN_RANK = 16
"""That adapters have where programs serve any."""


class LayerCosts(Protocol):
    """What ranks pay. In any unit: only sums are compared."""

    def node(self, node: Node, graph: Graph, rule: Sharding, needs: tuple[bool, ...]) -> float:
        """To run a node of a graph of whole tensors, and its gradients, on one rank.

        `needs` says which inputs need a gradient.
        """

    def send(self, kind: str, *types: TensorType) -> float:
        """An `all_reduce` or `reduce_scatter` of tensors, or an `all_gather` to the wholes.

        One message; of no tensor it costs what a message does that carries nothing.
        """

    def bytes_sent(self, kind: str, *types: TensorType) -> int:
        """By each rank in it."""

    def place(self, type_: TensorType, dim: int) -> float:
        """To write a rank's part of a whole tensor among zeros."""

    def sum_gradient(self, type_: TensorType) -> float:
        """A batch's share of the sum of an adapter weight's gradient over the ranks."""


class ByteCosts:
    """Bytes between ranks for one token, and a byte for every FLOPS_PER_BYTE operations.

    What a rank computes counts, as a product on whole tensors is done by all. No device is known:
    the base's plan is the same on all. The unit is an operation of all ranks, so that sums are of
    whole numbers, and ways that cost the same are known as such.

    Args:
        degree: number of ranks.
        parts_tokens: whether ranks may hold parts of the tokens. Then costs are of a token on each
            rank, and what is no product counts, too: else to run a norm on all tokens were as good.
    """

    def __init__(self, degree: int, parts_tokens: bool = False) -> None:
        self.degree = degree
        self._parts_tokens = parts_tokens
        self._tokens = degree if parts_tokens else 1

    def node(self, node: Node, graph: Graph, rule: Sharding, needs: tuple[bool, ...]) -> float:
        entry = operator(node.op)
        if not entry.is_product and not self._parts_tokens:
            return 0.0
        types = tuple(graph.types[name] for name in node.inputs)
        outputs = tuple(value.type for value in node.outputs)
        flops = entry.flops(types, outputs, dict(node.attributes))
        work = _number(flops, self._tokens, CONTEXT_TOKENS)
        is_parted = any(layout.dim for layout in rule.inputs)
        return work if is_parted else work * self.degree

    def send(self, kind: str, *types: TensorType) -> float:
        return float(FLOPS_PER_BYTE * self.degree * self.bytes_sent(kind, *types))

    def place(self, type_: TensorType, dim: int) -> float:
        return 0.0

    def bytes_sent(self, kind: str, *types: TensorType) -> int:
        size = sum(size_bytes(type_, self._tokens) for type_ in types)
        return ring_bytes(kind, size, self.degree)

    def sum_gradient(self, type_: TensorType) -> float:
        return 0.0


class DeviceCosts:
    """Seconds of a layer's forward and backward on one rank.

    Args:
        model: of the device and its links.
        degree: number of ranks.
        tokens: of a step.
        context: tokens that a token attends to.
        gradient_accumulation_steps: batches an optimizer step, which share the sums of gradients.
    """

    def __init__(
        self,
        model: CostModel,
        degree: int,
        tokens: int,
        context: int,
        gradient_accumulation_steps: int = 1,
    ) -> None:
        self.model = model
        self.degree = degree
        self.tokens = tokens
        self.context = context
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self._known: dict[object, float] = {}

    def node(self, node: Node, graph: Graph, rule: Sharding, needs: tuple[bool, ...]) -> float:
        ins = self._held([graph.types[name] for name in node.inputs], rule.inputs)
        outs = self._held([value.type for value in node.outputs], rule.outputs)
        key = (rule.op or node.op, ins, outs, node.attributes, needs)
        if key not in self._known:
            attributes = operator(key[0]).local_attributes(dict(node.attributes), outs)
            self._known[key] = self._seconds(key[0], ins, outs, attributes)
            if any(needs):
                local = backward_of(key[0], ins, outs, attributes, needs)
                self._known[key] += sum(
                    self._seconds(n.op, t, tuple(v.type for v in n.outputs), dict(n.attributes))
                    for n, t in ((n, tuple(local.types[i] for i in n.inputs)) for n in local.nodes)
                )
        return self._known[key]

    def send(self, kind: str, *types: TensorType) -> float:
        size = sum(size_bytes(type_, self.tokens) for type_ in types)
        return self.model.collective_seconds(kind, size, self.degree)

    def bytes_sent(self, kind: str, *types: TensorType) -> int:
        size = sum(size_bytes(type_, self.tokens) for type_ in types)
        return ring_bytes(kind, size, self.degree)

    def place(self, type_: TensorType, dim: int) -> float:
        whole = _ranked(type_)
        part = local_type(whole, partitioned(dim), self.degree)
        return self._seconds("placed_part", (part,), (whole,), {"dim": dim, "degree": self.degree})

    def sum_gradient(self, type_: TensorType) -> float:
        """A batch's share of it, which is done once an optimizer step.

        All are summed together, so that each pays for its bytes, and none for the message.
        """
        size = size_bytes(type_, self.tokens)
        one, two = (
            self.model.collective_seconds("all_reduce", times * size, self.degree)
            for times in (1, 2)
        )
        return (two - one) / self.gradient_accumulation_steps

    def _held(self, types: Sequence[TensorType], layouts: Sequence[Layout]) -> Types:
        pairs = zip(types, layouts, strict=True)
        return tuple(local_type(_ranked(type_), layout, self.degree) for type_, layout in pairs)

    def _seconds(self, op: str, ins: Types, outs: Types, attributes: Attributes) -> float:
        if operator(op).is_view:
            return 0.0
        return self.model.operator_seconds(op, ins, outs, attributes, self.tokens, self.context)


def ring_bytes(kind: str, size: int, degree: int) -> int:
    """Bytes that a rank sends in a ring: `all_reduce` 2 (n - 1) / n, the others (n - 1) / n."""
    return (2 if kind == "all_reduce" else 1) * size * (degree - 1) // degree


def size_bytes(type_: TensorType, tokens: int) -> int:
    """Bytes of a tensor of so many tokens; a rank that is left open is OPEN_RANK."""
    return int(_number(_size(type_), tokens, 0))


@lru_cache(maxsize=4096)
def _size(type_: TensorType) -> sympy.Expr:
    return sympy.sympify(type_.size_bytes)


@lru_cache(maxsize=65536)
def _number(formula: sympy.Expr, tokens: int, context: int) -> float:
    known = {TOKENS: tokens, CONTEXT: context}
    free = sympy.sympify(formula).free_symbols
    return float(formula.subs({symbol: known.get(symbol, OPEN_RANK) for symbol in free}))


def _ranked(type_: TensorType) -> TensorType:
    """The type where open ranks are OPEN_RANK."""
    sizes = tuple(
        size
        if isinstance(size, int)
        else size.subs(dict.fromkeys(size.free_symbols - {TOKENS}, OPEN_RANK))
        for size in type_.shape
    )
    return type_.with_shape(tuple(int(s) if getattr(s, "is_Integer", 0) else s for s in sizes))


def backward_of(
    op: str, ins: Types, outs: Types, attributes: Attributes, needs: tuple[bool, ...]
) -> Graph:
    """The gradient of one operator, of its first output's: inputs are `i0`, …, outputs `o0`, …."""
    values = tuple(Value(f"i{i}", type_) for i, type_ in enumerate(ins))
    made = tuple(Value(f"o{i}", type_) for i, type_ in enumerate(outs))
    pairs: tuple[tuple[str, Attribute], ...] = tuple(sorted(attributes.items()))
    node = Node(op, tuple(value.name for value in values), made, pairs)
    graph = Graph("one", values, (), (node,), (made[0].name,))
    builder = Builder("backward")
    incoming = builder.input("d", outs[0])
    upstream = (incoming, *(None,) * (len(outs) - 1))
    context = Gradient(builder, graph, node, upstream, needs)
    gradients = operator(op).gradient(context)
    return builder.build([name for name in gradients if name is not None])
