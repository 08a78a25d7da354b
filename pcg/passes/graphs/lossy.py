"""Lossy saving: backward reads approximations of saved values, with a bounded error.

    outer(ds, h)     h = mul(silu(g), u)      reads mul(silu(ĝ), û)
    ĝ = dequantize_fp8(codes, scale)          codes, scale = quantize_fp8(g), in forward

Backward reads an approximation of a value if the operator table bounds the effect of its error on
the result (`Operator.bounded_in`). Statistics of a softmax or a norm, masks, integers and compared
values have no bound, and stay exact. Inputs and results of matrix products are approximated by
their codes; a value recomputed from them by operators with bounds is recomputed from
approximations. A norm is differentiated from its result x̂ in codes, and its exact rstd.

Codes are additional values of the forward graph, and the save problem decides whether they are
saved (`pcg.passes.memory.save_problem`); if not, `exact_where_unsaved` lets backward read the exact
values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Sequence
from math import prod

from pcg.ir.analysis.builder import Builder
from pcg.ir.graph import Attribute, Graph, Node, Value
from pcg.ir.operators import operator
from pcg.ir.operators.lossy import Decoder
from pcg.passes.graphs.differentiate import Differentiated, GradientPass, with_nodes

LEAST_FEATURES = 32
"""Shortest last dim that is saved in codes: a scale for fewer elements saves hardly any bytes."""
_NORMS = {"rms_norm": False, "layer_norm": True}
_NORM_GRADIENTS = {"rms_norm_backward": False, "layer_norm_backward": True}
"""Norms, and their gradients: True if they subtract the mean."""


class Quantize(GradientPass):
    """Compute fp8 codes in forward, and read their values in backward."""

    name = "quantize"

    def run(self, before: Differentiated) -> Differentiated:
        forward_values = {v.name for v in before.backward.inputs if v.name in before.graph.types}
        backward_values = {value.name for node in before.backward.nodes for value in node.outputs}
        approximations = _Approximations(before.graph, backward_values)
        approximations.require(before.backward.nodes, forward_values)
        nodes = [approximations.read_by(node, forward_values) for node in before.backward.nodes]
        types = approximations.builder.types
        read = {name for node in nodes for name in node.inputs}
        inputs = {value.name: value for value in before.backward.inputs}
        for name in types:
            if (
                name in read
                and name not in backward_values
                and name not in before.graph.parameters_by_name
            ):
                inputs.setdefault(name, Value(name, types[name]))
        graph = before.graph.replace(nodes=_early(before.graph, approximations.builder.nodes))
        backward = with_nodes(before.backward, nodes, inputs.values())
        return dataclasses.replace(before, graph=graph, backward=backward)


class _Approximations:
    """The approximations of a forward graph's values, which its builder adds.

    Their names differ from backward's values, as backward may recompute them.
    """

    def __init__(self, graph: Graph, of_backward: Container[str]) -> None:
        self._graph = graph
        self.builder = Builder.extending(graph)
        self.builder.reserved = of_backward
        self._found: dict[str, str] = {}
        self._coded_leaves: set[str] = set()
        self._summed: set[str] = set()

    def require(self, nodes: Iterable[Node], available: Container[str]) -> None:
        """Record the values whose codes backward always needs."""
        for node in nodes:
            if node.op in _NORM_GRADIENTS and node.inputs[1] in available:
                self._coded_leaves.add(_before_weight(node.inputs[1]))
                continue
            entry = operator(node.op)
            for index, name in enumerate(node.inputs):
                if name in available and index in entry.row_bounded_in:
                    self._summed.add(name)
                    self._coded_leaves.add(name)
                if name in available and index in entry.bounded_in:
                    leaves = self._leaves(name)
                    self._coded_leaves.update(leaves if len(leaves) == 1 else ())

    def read_by(self, node: Node, available: Container[str]) -> Node:
        """Return the backward node with approximations of the available values."""
        if node.op in _NORM_GRADIENTS and node.inputs[1] in available:
            return self._norm_gradient(node)
        entry, inputs = operator(node.op), [*node.inputs]
        for index, name in enumerate(node.inputs):
            if name in available and index in entry.bounded_in:
                inputs[index] = self.of(name)
            elif name in available and index in entry.row_bounded_in:
                inputs[index] = self._of_rows(name)
            elif name in available and index in entry.finely_bounded_in:
                inputs[index] = self._packed(name)
        return dataclasses.replace(node, inputs=tuple(inputs))

    def of(self, name: str) -> str:
        if name not in self._found:
            self._found[name] = self._made(name)
        return self._found[name]

    def _made(self, name: str) -> str:
        graph = self._graph
        if name in graph.parameters_by_name or not graph.types[name].is_token_wise:
            return name
        node = graph.producers.get(name)
        missing = {k: n for k, n in self._leaves(name).items() if k not in self._coded_leaves}
        if missing and prod(graph.types[name].features) <= sum(missing.values()):
            self._coded_leaves.add(name)
            return self._coded(name)
        self._coded_leaves.update(missing)
        if node is None or name in self._leaves(name):
            return self._coded(name)
        if node.op in _NORMS:
            return self._normed(node)
        bounded = _bounded(node)
        inputs = [self.of(n) if i in bounded else n for i, n in enumerate(node.inputs)]
        if inputs == [*node.inputs]:
            return name
        attributes, approximate = dict(node.attributes), f"{name}_approximate"
        return self.builder.add(node.op, inputs, name=approximate, scope=node.scope, **attributes)

    def _leaves(self, name: str) -> dict[str, int]:
        """Return the values whose codes approximate a value, with their elements per token."""
        types, node = self._graph.types, self._graph.producers.get(name)
        if name in self._graph.parameters_by_name or not types[name].is_token_wise:
            return {}
        elements = prod(types[name].features)
        if name in self._coded_leaves or node is None:
            return {name: elements}
        if node.op in _NORMS:
            return {_before_weight(node.inputs[0]): elements}
        if node.output.name != name or not _propagates(node):
            return {name: elements}
        leaves: dict[str, int] = {}
        for index in _bounded(node):
            if index < len(node.inputs):
                leaves |= self._leaves(node.inputs[index])
        return leaves

    def _coded(self, name: str) -> str:
        """Decode a value from its codes; use the codes of rows if another reader needs them."""
        if name in self._summed:
            return self._of_rows(name)
        type_ = self.builder.types[name]
        if not type_.is_float or not type_.features or type_.features[-1] < LEAST_FEATURES:
            return name
        node = self._graph.producers.get(name)
        scope = "" if node is None else node.scope
        codes = self.builder.add_many("quantize_fp8", [name], name=f"{name}_fp8", scope=scope)
        return self.builder.add(
            "dequantize_fp8", codes, name=f"{name}_approximate", scope=scope, dtype=type_.dtype
        )

    def _of_rows(self, name: str) -> str:
        """Decode a value from 8 bits an element, with an error relative to its block's maximum."""
        type_ = self.builder.types[name]
        if type_.features[-1] < LEAST_FEATURES:
            return name
        codes = self.builder.add_many("quantize_int8", [name], name=f"{name}_int8")
        again = {"name": f"{name}_rounded", "dtype": type_.dtype}
        return self.builder.add("dequantize_int8", codes, **again)

    def _packed(self, name: str) -> str:
        """Decode a bf16 value from 12 bits an element, with almost no error."""
        type_ = self.builder.types[name]
        is_wide = type_.dtype == "bf16" and type_.features[-1] >= LEAST_FEATURES
        if not is_wide or type_.features[-1] % 2:
            return name
        codes = self.builder.add_many("pack_bf16", [name], name=f"{name}_packed")
        return self.builder.add("unpack_bf16", codes, name=f"{name}_unpacked")

    def _normed(self, node: Node) -> str:
        """Compute a norm's result from codes of the value before its weight."""
        add, attributes = self.builder.add, dict(node.attributes)
        weights = [*node.inputs[1:]]
        standardized, _ = self._standardized(node.inputs[0], node, _NORMS[node.op])
        y = self._coded(standardized)
        if weights and (node.op == "rms_norm" or attributes["weight"]):
            weight = weights.pop(0)
            if attributes.get("offset"):
                weight = add("add", [weight], scope=node.scope, scalar=attributes["offset"])
            y = add("mul", [y, weight], name=f"{node.name}_approximate", scope=node.scope)
        if weights:
            y = add("add", [y, weights[0]], name=f"{node.name}_approximate", scope=node.scope)
        dtype = node.output.type.dtype
        if self.builder.types[y].dtype != dtype:
            y = add("cast", [y], name=f"{node.name}_approximate", scope=node.scope, dtype=dtype)
        return y

    def _norm_gradient(self, node: Node) -> Node:
        """Compute a norm's gradient from codes of the value before its weight, and rstd."""
        dy, x, *weight = node.inputs
        centered = _NORM_GRADIENTS[node.op]
        standardized, rstd = self._standardized(x, node, centered)
        offset = dict(node.attributes).get("offset", 0.0)
        attributes: dict[str, Attribute] = {"centered": centered, "offset": offset}
        return dataclasses.replace(
            node,
            op="standardized_backward",
            inputs=(dy, self._coded(standardized), rstd, *weight),
            attributes=tuple(sorted(attributes.items())),
        )

    def _standardized(self, x: str, node: Node, centered: bool) -> tuple[str, ...]:
        attributes = {"eps": node.attribute("eps"), "centered": centered}
        name = f"{x}_standardized"
        return self.builder.add_many("standardized", [x], name=name, scope=node.scope, **attributes)


def _early(graph: Graph, nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Return a graph's nodes with the added nodes directly after the values that they read."""
    added = nodes[len(graph.nodes) :]
    available = {value.name for value in graph.inputs} | set(graph.parameters_by_name)
    placed: list[Node] = []

    def place(node: Node) -> None:
        placed.append(node)
        available.update(value.name for value in node.outputs)

    def place_added() -> None:
        for other in added:
            if other.name not in available and available.issuperset(other.inputs):
                place(other)

    place_added()
    for node in graph.nodes:
        place(node)
        place_added()
    return tuple(placed)


def _before_weight(x: str) -> str:
    """Return a key for a norm's value before its weight, which no node computes."""
    return f"{x} standardized"


def _bounded(node: Node) -> tuple[int, ...]:
    """Return the inputs whose error changes a node's result by a known bound."""
    entry = operator(node.op)
    return (0,) if entry.is_view else tuple(entry.bounded_in)


def _propagates(node: Node) -> bool:
    entry = operator(node.op)
    if node.op == "slice":  # a part has fewer codes than the whole
        return False
    if entry.is_product or not node.output.type.is_float:
        return False
    return entry.is_view or bool(entry.bounded_in)


def exact_where_unsaved(gradients: Differentiated, saved: Container[str]) -> Differentiated:
    """Read exact values instead of codes that are not saved."""
    exact = {}
    for node in gradients.graph.nodes:
        if isinstance(operator(node.op), Decoder) and node.inputs[0] not in saved:
            exact[node.name] = gradients.graph.producers[node.inputs[0]].inputs[0]
    if not exact:
        return gradients

    def reading(node: Node) -> Node:
        return dataclasses.replace(node, inputs=tuple(exact.get(n, n) for n in node.inputs))

    graph, backward = gradients.graph, gradients.backward
    graph = graph.replace(nodes=tuple(map(reading, graph.nodes)))
    inputs = {value.name: value for value in backward.inputs}
    for name in exact.values():
        inputs.setdefault(name, Value(name, graph.types[name]))
    backward = with_nodes(backward, [*map(reading, backward.nodes)], inputs.values())
    return dataclasses.replace(gradients, graph=graph, backward=backward)
