"""Differentiate a graph: its backward graph, which reads values of the forward one.

Gradients flow to the adapters' parameters, to the inputs asked for, and to the frozen weights of
matrix products, as reverse-mode differentiation has it that knows of no freezing (FlexLLM algorithm
1, line 3); `pcg.passes.prune` drops what nobody wants of that. Backward reads the values that the
operator table's rules ask for (its UPDATEINPUT), and nothing else; whether forward saves them or
backward recomputes them is decided by `pcg.passes.memory.rematerialize`.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from pcg.ir.analysis.trainable import reachable, trained
from pcg.ir.builder import Builder
from pcg.ir.graph import Graph, Node, Value
from pcg.ir.operators import Gradient, operator
from pcg.passes.pass_base import Pass


@dataclass(frozen=True)
class Differentiated:
    """A graph and its backward.

    Attributes:
        graph: the graph that was differentiated.
        backward: takes the gradients of the graph's outputs, then values of the graph; gives the
            gradients of the inputs asked for, of the adapter parameters, and of frozen weights.
        wrt: the inputs whose gradients are given.
        trained: the adapter parameters whose gradients are given.
        frozen: the frozen weights whose gradients are given; none once pruned.
        wanted: the inputs whose gradients are wanted; of `wrt`, pruning leaves these.
    """

    graph: Graph
    backward: Graph
    wrt: tuple[str, ...]
    trained: tuple[str, ...]
    frozen: tuple[str, ...]
    wanted: tuple[str, ...]

    @property
    def needed(self) -> tuple[str, ...]:
        """The values of the graph that backward reads: some of its inputs, and outputs of nodes."""
        return tuple(v.name for v in self.backward.inputs if v.name in self.graph.types)


def gradient_name(name: str) -> str:
    """The backward graph's name for the gradient of an output of the forward graph."""
    return f"d_{name}"


class GradientPass(Pass[Differentiated, Differentiated]):
    """A pass over a graph and its backward."""


@dataclass(frozen=True)
class Differentiate(Pass[Graph, Differentiated]):
    """Differentiate a graph with attached bypass networks.

    Attributes:
        wrt: inputs whose gradients are made; every float input by default.
        outputs: outputs that gradients come from; all by default.
        wanted: inputs whose gradients are wanted; all of `wrt` by default.
    Raises:
        UnsupportedError: an operator on the way has no gradient; it is named.
    """

    name = "differentiate"
    wrt: tuple[str, ...] | None = None
    outputs: tuple[str, ...] | None = None
    wanted: tuple[str, ...] | None = None

    def run(self, before: Graph) -> Differentiated:
        wrt = self.wrt
        if wrt is None:
            wrt = tuple(value.name for value in before.inputs if value.type.is_float)
        outputs = before.outputs if self.outputs is None else self.outputs
        return _differentiated(before, wrt, outputs, wrt if self.wanted is None else self.wanted)


def _differentiated(
    graph: Graph, wrt: Sequence[str], outputs: Sequence[str], wanted: Sequence[str]
) -> Differentiated:
    frozen = _product_weights(graph)
    active = reachable(graph, {*wrt, *trained(graph), *frozen})
    builder = Builder(f"{graph.name}_backward")
    builder.reserved = graph.types
    gradients: dict[str, str] = {}
    for name in outputs:
        if name in active:
            value = Value(gradient_name(name), graph.types[name])
            gradients[name] = builder.input(value.name, value.type)
    for node in reversed(graph.nodes):
        _backpropagate(builder, graph, node, active, gradients)
    adapters = [name for name in trained(graph) if name in gradients]
    frozen = [name for name in frozen if name in gradients]
    results = [gradients[name] for name in [*wrt, *adapters, *frozen]]
    backward = builder.build(results)
    backward = _drop_unused_inputs(backward)
    backward = backward.renamed(_gradient_names(backward, gradients))
    return Differentiated(
        graph, backward, tuple(wrt), tuple(adapters), tuple(frozen), tuple(wanted)
    )


def _product_weights(graph: Graph) -> list[str]:
    """Frozen weights, and biases, of matrix products."""
    products = (node for node in graph.nodes if node.op == "linear")
    read = {name for node in products for name in node.inputs[1:]}
    return [p.name for p in graph.parameters if p.role == "frozen" and p.name in read]


def _backpropagate(
    builder: Builder, graph: Graph, node: Node, active: Container[str], gradients: dict[str, str]
) -> None:
    upstream = tuple(gradients.get(value.name) for value in node.outputs)
    needs = tuple(name in active for name in node.inputs)
    if not any(upstream) or not any(needs):
        return
    context = Gradient(builder, graph, node, upstream, needs)
    for name, need, gradient in zip(
        node.inputs, needs, operator(node.op).gradient(context), strict=True
    ):
        if need and gradient is not None:
            before = gradients.get(name)
            gradients[name] = (
                gradient
                if before is None
                else builder.add("add", [before, gradient], scope=node.scope)
            )


def _drop_unused_inputs(graph: Graph) -> Graph:
    read = {name for node in graph.nodes for name in node.inputs} | set(graph.outputs)
    return graph.replace(inputs=tuple(value for value in graph.inputs if value.name in read))


def _gradient_names(backward: Graph, gradients: dict[str, str]) -> dict[str, str]:
    """`d_x` for the gradient of x, where no other value has that name."""
    names: dict[str, str] = {}
    taken = set(backward.types)
    made = set(backward.producers)
    for name, gradient in gradients.items():
        new = gradient_name(name)
        if gradient in made and gradient not in names and new not in taken:
            names[gradient] = new
            taken.add(new)
    return names
