"""A rule that raises activations: they are recognised by their values."""

from __future__ import annotations

from functools import lru_cache

from pcg.ir.graph import Node
from pcg.ir.operators import operator
from pcg.passes.raising.rewriter import NewName, Rewriter


def activation(rewriter: Rewriter, node: Node) -> NewName | None:
    """A product that is gelu(x) or silu(x) by value, though written out."""
    if node.op != "mul" or len(node.inputs) != 2:
        return None
    nodes, leaves = _elementwise_cone(rewriter, node)
    ops = {n.op for n in nodes}
    if len(leaves) != 1 or not ops & {"tanh", "sigmoid", "pointwise"}:
        return None
    (leaf,) = leaves
    if rewriter.graph.types[leaf] != node.output.type:
        return None
    # BLOOM has √(2/π) to eight digits: gelu in fp32, a function of its own in fp64.
    tolerance = 1e-13 if node.output.type.dtype == "f64" else 1e-7
    for name, attributes in _ACTIVATIONS:
        if _same_function(tuple(nodes), leaf, node.name, name, attributes, tolerance):
            return rewriter.add(name, leaf, **dict(attributes))
    return None


_ACTIVATIONS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    ("gelu", (("approximate", "none"),)),
    ("gelu", (("approximate", "tanh"),)),
    ("silu", ()),
)
_ARITHMETIC = ("add", "div", "mul", "neg", "pointwise", "pow", "sigmoid", "tanh")


def _elementwise_cone(rewriter: Rewriter, root: Node) -> tuple[list[Node], set[str]]:
    """The arithmetic above a node back to its leaves, as far as one activation goes."""
    nodes: list[Node] = []
    leaves: set[str] = set()

    def visit(name: str) -> None:
        node = rewriter.producer(name, *_ARITHMETIC)
        if node is None or len(nodes) > 16:
            leaves.add(name)
        elif node not in nodes:
            for source in node.inputs:
                visit(source)
            nodes.append(node)

    visit(root.name)
    return nodes, leaves


@lru_cache(maxsize=256)
def _same_function(
    nodes: tuple[Node, ...],
    leaf: str,
    root: str,
    name: str,
    attributes: tuple[tuple[str, str], ...],
    tolerance: float,
) -> bool:
    """Return whether the nodes compute a known activation, to a tolerance on a grid in fp64."""
    import torch
    import torch.nn.functional as F

    grid = torch.linspace(-8, 8, 257, dtype=torch.float64)
    namespace = {"torch": torch, "F": F}
    values = {leaf: grid}
    for node in nodes:
        arguments = [f"values[{source!r}]" for source in node.inputs]
        source = operator(node.op).source(arguments, dict(node.attributes))
        values[node.name] = eval(source, namespace, {"values": values})
    known = eval(operator(name).source(["grid"], dict(attributes)), namespace, {"grid": grid})
    return bool((values[root] - known).abs().max() < tolerance)
