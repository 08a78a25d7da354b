"""Differentiation of a graph: its backward graph, which reads values of the forward graph.

Gradients flow to the adapters' parameters, to the requested inputs, and to the frozen weights of
matrix products, as in reverse-mode differentiation without freezing (FlexLLM algorithm 1, line 3);
`pcg.passes.graphs.gradients` prunes the unwanted gradients. Backward reads exactly the values that
the operator table's rules require (FlexLLM's UPDATEINPUT). `pcg.passes.memory` decides whether
forward saves these values or backward recomputes them.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from pcg.ir.analysis.builder import Builder
from pcg.ir.analysis.dataflow import reachable, trained
from pcg.ir.graph import Graph, Node, Value
from pcg.ir.operators import Gradient, operator
from pcg.ir.program.interfaces import check_backward, gradient_name
from pcg.ir.program.program import ModelGraph
from pcg.passes.graphs.pass_base import Pass


@dataclass(frozen=True)
class Differentiated:
    """A graph and its backward.

    Attributes:
        graph: the differentiated graph.
        backward: takes the gradients of the graph's outputs, then values of the graph; returns the
            gradients of `wrt`, of `trained`, and of `frozen`.
        wrt: inputs with a gradient.
        trained: adapter parameters with a gradient.
        frozen: frozen weights with a gradient; empty after pruning.
        wanted: the inputs of `wrt` that pruning keeps.
    """

    graph: Graph
    backward: Graph
    wrt: tuple[str, ...]
    trained: tuple[str, ...]
    frozen: tuple[str, ...]
    wanted: tuple[str, ...]

    @property
    def needed(self) -> tuple[str, ...]:
        return tuple(v.name for v in self.backward.inputs if v.name in self.graph.types)

    def check(self) -> None:
        """Check that graph and backward match; raise TypeCheckError with both names otherwise."""
        check_backward(self.graph, self.backward, (*self.wrt, *self.trained, *self.frozen))


@dataclass(frozen=True)
class LayerKind:
    """Layers with equal gradients: the layers of a block, except for the first trained layer.

    `block` is the index of their block in the model; `shared` are the prologue's outputs that all
    layers read.
    """

    name: str
    block: int
    layers: tuple[int, ...]
    shared: tuple[str, ...]
    gradients: Differentiated


class GradientPass(Pass[Differentiated, Differentiated]):
    """A pass over a graph and its backward."""


def with_nodes(graph: Graph, nodes: Sequence[Node], inputs: Iterable[Value]) -> Graph:
    """Replace the nodes, and keep only inputs that the nodes read."""
    read = {name for node in nodes for name in node.inputs} | set(graph.outputs)
    return graph.replace(nodes=tuple(nodes), inputs=tuple(v for v in inputs if v.name in read))


@dataclass(frozen=True)
class Differentiate(Pass[Graph, Differentiated]):
    """Differentiate a graph with attached bypass networks.

    Attributes:
        wrt: inputs to differentiate by; every float input by default.
        outputs: outputs with an incoming gradient; all by default.
        wanted: inputs whose gradients pruning keeps; all of `wrt` by default.
    Raises:
        UnsupportedError: an operator on the path has no gradient; names it.
    """

    name = "differentiate"
    wrt: tuple[str, ...] | None = None
    outputs: tuple[str, ...] | None = None
    wanted: tuple[str, ...] | None = None

    def run(self, before: Graph) -> Differentiated:
        wrt = self.wrt
        if wrt is None:
            wrt = tuple(value.name for value in before.inputs if value.type.is_float)
        wanted = wrt if self.wanted is None else self.wanted
        frozen = _product_weights(before)
        active = reachable(before, {*wrt, *trained(before), *frozen})
        builder = Builder(f"{before.name}_backward")
        builder.reserved = before.types
        gradients: dict[str, str] = {}
        for name in before.outputs if self.outputs is None else self.outputs:
            if name in active:
                gradients[name] = builder.input(gradient_name(name), before.types[name])
        for node in reversed(before.nodes):
            _backpropagate(builder, before, node, active, gradients)
        for name, output in zip(wrt, before.outputs, strict=False):
            if name not in gradients and gradients.get(output):  # carried for later layers alone
                gradients[name] = builder.add("mul", [gradients[output]], scalar=0.0)
        adapters = tuple(name for name in trained(before) if name in gradients)
        frozen = tuple(name for name in frozen if name in gradients)
        backward = builder.build([gradients[name] for name in (*wrt, *adapters, *frozen)])
        backward = with_nodes(backward, backward.nodes, backward.inputs)
        backward = backward.renamed(_gradient_names(backward, gradients))
        return Differentiated(before, backward, wrt, adapters, frozen, wanted)


def _product_weights(graph: Graph) -> tuple[str, ...]:
    read = {name for node in graph.nodes if node.op == "linear" for name in node.inputs[1:]}
    return tuple(
        p.name
        for p in graph.parameters
        if p.role == "frozen" and p.name in read and p.type.is_float  # quantized ones have none
    )


def _backpropagate(
    builder: Builder, graph: Graph, node: Node, active: Container[str], gradients: dict[str, str]
) -> None:
    upstream = tuple(gradients.get(value.name) for value in node.outputs)
    needs = tuple(name in active for name in node.inputs)
    if not any(upstream) or not any(needs):
        return
    input_gradients = operator(node.op).gradient(Gradient(builder, graph, node, upstream, needs))
    for name, need, gradient in zip(node.inputs, needs, input_gradients, strict=True):
        if need and gradient is not None:
            if name in gradients:
                gradient = builder.add("add", [gradients[name], gradient], scope=node.scope)
            gradients[name] = gradient


def _gradient_names(backward: Graph, gradients: dict[str, str]) -> dict[str, str]:
    """Return `d_x` for the gradient of x, unless another value has that name."""
    names: dict[str, str] = {}
    for name, gradient in gradients.items():
        new = gradient_name(name)
        if gradient in backward.producers and gradient not in names and new not in backward.types:
            names[gradient] = new
    return names


def layer_kinds(model: ModelGraph) -> tuple[LayerKind, ...]:
    """Differentiate the layers of a model.

    The first trained layer passes no gradient on, and the layers below it have no backward.
    """
    groups: dict[tuple[int, bool], list[int]] = {}
    trained_below = bool(trained(model.prologue))
    for layer, index in enumerate(model.layers):
        groups.setdefault((index, trained_below), []).append(layer)
        trained_below |= bool(trained(model.blocks[index]))
    kinds = []
    for (index, passes_on), layers in groups.items():
        block = model.blocks[index]
        inputs, count = tuple(value.name for value in block.inputs), len(block.outputs)
        carried, shared = inputs[:count], inputs[count:]
        gradients = Differentiate(wrt=carried, wanted=carried if passes_on else ()).run(block)
        below = "_first" if trained(block) else "_below"
        name = block.name if passes_on else f"{block.name}{below}"
        kinds.append(LayerKind(name, index, tuple(layers), shared, gradients))
    return tuple(kinds)
