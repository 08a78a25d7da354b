"""The split problem of a graph, or of a layer's forward and backward together.

Between a layer's forward and its backward, the rest of the model runs: a node of the client, from
the layer's outputs to their gradients. No piece of the base spans both, so a forward value that a
backward piece reads is sent again, or recomputed at the base.

A view with all elements counts as its source. A value computed only from frozen weights counts as a
weight.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod

from pcg.errors import UnsupportedError
from pcg.ir.graph import Graph, Node
from pcg.ir.operators import operator
from pcg.ir.types import TensorType
from pcg.parallel.costs.work import is_free
from pcg.passes.placement.split_problem import Side, SplitCosts, SplitNode, SplitProblem, SplitValue

LINEAR = ("linear", "linear_backward")
"""Operators that may be sent under privacy."""
PIECE_OPERATORS = frozenset((
    *LINEAR, "add", "cast", "clamp", "clamp_backward", "concat", "div", "exp", "expand", "gelu",
    "gelu_backward", "layer_norm", "layer_norm_backward", "mean", "mul", "neg", "permute", "pow",
    "relu", "relu_backward", "repeat_interleave", "reshape", "rms_norm", "rms_norm_backward",
    "rope", "rope_backward", "rsqrt", "sigmoid", "sigmoid_backward", "silu", "silu_backward",
    "slice", "slice_backward", "sqrt", "sub", "sum", "tanh", "tanh_backward",
))  # fmt: skip
"""Operators that a base runs for its clients; a token's result depends on that token only."""
REST = "rest of the model"


def split_problem(
    graph: Graph,
    backward: Graph | None,
    costs: SplitCosts,
    *,
    linear_only: bool = False,
    private: Iterable[str] = (),
) -> SplitGraph:
    """Return the split problem of a graph and its backward, if any.

    Args:
        linear_only: the base runs only linear operators, as noise hides the sent values.
        private: inputs that never leave the client.
    Raises:
        UnsupportedError: the base would have to run an operator that is not linear.
        CostModelError: a device has no cost for an operator.
    """
    builder = _Builder(costs, linear_only, set(private))
    outputs = list(graph.outputs)
    if backward is None or not backward.nodes:
        builder.add(graph.without_dead_code())
    else:
        builder.add(graph)
        forward_values = [value for value in backward.inputs if value.name not in graph.types]
        builder.rest(graph.outputs, [(value.name, value.type) for value in forward_values])
        builder.add(backward)
        outputs = list(backward.outputs)
    return builder.build(outputs)


@dataclass(frozen=True)
class SplitGraph:
    """A split problem, and its nodes in the graph.

    Attributes:
        graphs: the graph, and its backward if any.
        nodes: the graph's nodes by their number in the problem; None for the rest of the model.
        first_backward: the number of the first node after the forward.
        held: frozen weights of at least two dims that the client's nodes read, with their bytes.
    """

    problem: SplitProblem
    graphs: tuple[Graph, ...]
    nodes: tuple[Node | None, ...]
    first_backward: int
    held: tuple[tuple[str, int], ...]


@dataclass
class _Builder:
    costs: SplitCosts
    linear_only: bool
    hidden: set[str]
    nodes: list[SplitNode] = field(default_factory=list)
    origins: list[Node | None] = field(default_factory=list)
    values: list[SplitValue] = field(default_factory=list)
    graphs: list[Graph] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)
    weights: set[str] = field(default_factory=set)
    """Values computed only from frozen weights: vectors are on both sides, matrices at the base."""
    matrices: set[str] = field(default_factory=set)
    aside: set[str] = field(default_factory=set)
    """Values without a row for each token."""
    held: dict[str, int] = field(default_factory=dict)
    first_backward: int | None = None

    def add(self, graph: Graph) -> None:
        self.graphs.append(graph)
        for value in graph.inputs:
            if value.name not in self.numbers:
                self._value(value.name, value.type)
        norms = [node for node in graph.nodes if node.op.startswith(("layer_norm", "rms_norm"))]
        of_norms = {name for node in norms for name in node.inputs}  # heads' norms have two dims
        for parameter in graph.parameters:
            name = parameter.name
            if parameter.role == "adapter":
                self.hidden.add(name)
                continue
            self.weights.add(name)
            if parameter.role == "frozen" and len(parameter.type.dims) > 1 and name not in of_norms:
                self.matrices.add(name)
        for node in graph.nodes:
            self._node(graph, node)

    def rest(self, outputs: Iterable[str], gradients: Iterable[tuple[str, TensorType]]) -> None:
        """Insert the rest of the model between a forward and its backward."""
        reads = tuple(dict.fromkeys(self.numbers[name] for name in outputs))
        values = tuple(self._value(name, type_) for name, type_ in gradients)
        self.nodes.append(SplitNode(REST, Side.CLIENT, 0, 0, reads, values))
        self.origins.append(None)
        self.first_backward = len(self.nodes)

    def build(self, outputs: Iterable[str]) -> SplitGraph:
        wanted = [self.numbers[name] for name in outputs if name in self.numbers]
        problem = SplitProblem(
            tuple(self.nodes),
            tuple(self.values),
            tuple(dict.fromkeys(wanted)),
            self.costs.latency_ps,
        )
        held = tuple(self.held.items())
        first = len(self.nodes) if self.first_backward is None else self.first_backward
        return SplitGraph(problem, tuple(self.graphs), tuple(self.origins), first, held)

    def _value(self, name: str, type_: TensorType) -> int:
        size = self.costs.size_bytes(type_)
        time = self.costs.send_ps(size)
        self.numbers[name] = len(self.values)
        if not type_.is_token_wise:
            self.aside.add(name)
        self.values.append(SplitValue(name, size, time, time))
        return self.numbers[name]

    def _node(self, graph: Graph, node: Node) -> None:
        if all(name in self.weights for name in node.inputs) and node.inputs:
            names = {value.name for value in node.outputs}
            self.weights |= names
            if self.matrices.intersection(node.inputs):
                self.matrices |= names
            return
        source = node.inputs[0] if node.inputs else ""
        if source in self.numbers and len(node.outputs) == 1 and is_free(node.op):
            sizes = (graph.types[source], node.output.type)
            if prod(sizes[0].features) == prod(sizes[1].features):
                self.numbers[node.name] = self.numbers[source]
                if source in self.hidden:
                    self.hidden.add(node.name)
                return
        side = self._side(node)
        if side is Side.CLIENT:
            for name in self.matrices.intersection(node.inputs):
                self.held[name] = self.costs.size_bytes(graph.types[name])
        reads = tuple(dict.fromkeys(self.numbers[n] for n in node.inputs if n in self.numbers))
        values = tuple(self._value(value.name, value.type) for value in node.outputs)
        times = self.costs.node_ps(graph, node, side)
        self.nodes.append(SplitNode(node.name, side, *times, reads, values))
        self.origins.append(node)

    def _side(self, node: Node) -> Side:
        entry = operator(node.op)
        if self.hidden.intersection(node.inputs):
            # Token-wise results of hidden values may be sent: they include an adapter's addition.
            names = (value.name for value in node.outputs if not value.type.is_token_wise)
            self.hidden.update(names)
            return Side.CLIENT
        if entry.sees_sequences or entry.sees_rows or entry.is_random:
            return Side.CLIENT
        if not all(value.type.is_token_wise for value in node.outputs):
            return Side.CLIENT  # an adapter's gradient, a sum over tokens
        if node.op == "embedding":
            return Side.CLIENT  # the user's tokens stay private
        if self.aside.intersection(node.inputs):
            return Side.CLIENT  # sent values have a row for each token
        is_product = bool(self.matrices.intersection(node.inputs))
        if not self.linear_only and (is_product or node.op in PIECE_OPERATORS):
            return Side.BASE if is_product else Side.EITHER
        if not is_product:
            return Side.CLIENT
        if node.op not in LINEAR:
            raise UnsupportedError(
                f"{node.op} reads frozen weights and is not linear, so noise cannot hide what is "
                "sent to it; leave privacy out"
            )
        return Side.BASE
