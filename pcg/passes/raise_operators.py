"""Raise elementary arithmetic to the table's model operators.

    x · rsqrt(mean(x²) + eps) · w                 rms_norm, with its roundings and offset
    (x - mean) · rsqrt(var + eps) · w             layer_norm
    x · cos + rotate(x) · sin                     rope, half or interleaved, on a part of the head
    0.5 x (1 + tanh(…)), x sigmoid(x)             gelu, silu: recognised by their values
    linear(x, W) + b                              linear with a bias
    attention over repeated KV heads              attention over the KV heads themselves

Rules go by the arithmetic, never by the model's name.

The file is long because it is a table of rules: one pattern after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

from pcg.ir.graph import Graph, Node
from pcg.ir.operators import operator
from pcg.ir.program.program import ModelGraph
from pcg.ir.types import TOKENS
from pcg.passes.naming import readable_names
from pcg.passes.pass_base import GraphPass, ModelPass
from pcg.passes.rewrite import NewName, Rewriter, rewrite


class RaiseOperators(ModelPass):
    """Write a model in fewer, larger operators, with readable names."""

    name = "raise"

    def run(self, before: ModelGraph) -> ModelGraph:
        prologue = _raised(before.prologue)
        shared = dict(zip(before.prologue.outputs, prologue.outputs, strict=True))
        return ModelGraph(
            prologue,
            tuple(_raised(block, shared) for block in before.blocks),
            before.layers,
            _raised(before.epilogue, shared),
        )


class RaiseGraph(GraphPass):
    """Write one graph in fewer, larger operators, with readable names."""

    name = "raise"

    def run(self, before: Graph) -> Graph:
        return _raised(before)


def _raised(graph: Graph, inputs: Mapping[str, str] | None = None) -> Graph:
    """The same function in fewer, larger operators.

    Args:
        graph: any graph.
        inputs: new names for its inputs.
    """
    graph = rewrite(graph, (_drop_identity, _join_reshapes))
    graph = rewrite(graph, (_layer_norm, _rms_norm, _linear_bias, _rope, _activation))
    graph = rewrite(graph, (_plain_rms_norm, _partial_rope, _drop_identity, _join_reshapes))
    graph = rewrite(graph, (_unrepeat_heads, _drop_identity, _join_reshapes))
    return graph.renamed(readable_names(graph, inputs or {}))


# ------------------------------------------------------------------------------- cleaning


def _drop_identity(rewriter: Rewriter, node: Node) -> NewName | None:
    scalar = node.get("scalar")
    source = rewriter.graph.types[node.inputs[0]] if node.inputs else None
    neutral = (
        (node.op in ("mul", "div") and scalar == 1 and not node.get("reversed"))
        or (node.op == "add" and scalar == 0)
        or (node.op == "concat" and len(node.inputs) == 1)
        or (node.op in ("reshape", "cast", "expand") and node.output.type == source)
    )
    if neutral and node.output.type == source:
        return rewriter.new(node.inputs[0])
    return None


def _join_reshapes(rewriter: Rewriter, node: Node) -> NewName | None:
    if node.op == "reshape" and (inner := rewriter.producer(node.inputs[0], "reshape")):
        return rewriter.add("reshape", inner.inputs[0], scope=node.scope, **dict(node.attributes))
    return None


# ------------------------------------------------------------------------------- norms


@dataclass(frozen=True)
class _Normalised:
    """x / sqrt(mean(x²) + eps): the x before its cast to fp32, and eps."""

    x: str
    eps: float


def _normalised(rewriter: Rewriter, name: str) -> _Normalised | None:
    node = rewriter.producer(name, "mul")
    if node is None or len(node.inputs) != 2:
        return None
    for wide, scale in (node.inputs, node.inputs[::-1]):
        eps = _inverse_root_mean_square(rewriter, scale, wide)
        if eps is not None:
            return _Normalised(_before_widening(rewriter, wide), eps)
    return None


def _inverse_root_mean_square(rewriter: Rewriter, name: str, wide: str) -> float | None:
    """eps, where the value is rsqrt(mean(wide²) + eps)."""
    root = rewriter.producer(name, "rsqrt")
    total = root and rewriter.producer(root.inputs[0], "add")
    mean = total and rewriter.producer(total.inputs[0], "mean")
    if not (total and mean) or len(total.inputs) != 1 or mean.get("dim") != -1:
        return None
    square = rewriter.producer(mean.inputs[0], "pow", "mul")
    if square is None or any(name != wide for name in square.inputs):
        return None
    if square.op == "pow" and square.get("exponent") != 2.0:
        return None
    return float(cast("float", total.attribute("scalar")))


def _before_widening(rewriter: Rewriter, name: str) -> str:
    node = rewriter.producer(name, "cast")
    return node.inputs[0] if node and node.get("dtype") == "f32" else name


def _rms_norm(rewriter: Rewriter, node: Node) -> NewName | None:
    """w · normalised(x), whatever is rounded when."""
    root = node
    if node.op == "cast" and (inner := rewriter.producer(node.inputs[0], "mul")):
        root = inner
    if root.op != "mul" or len(root.inputs) != 2:
        return None
    for weight, value in (root.inputs, root.inputs[::-1]):
        rounding = rewriter.producer(value, "cast")
        found = _normalised(rewriter, rounding.inputs[0] if rounding else value)
        scale = _norm_weight(rewriter, weight)
        if found is None or scale is None:
            continue
        types = rewriter.graph.types
        if types[found.x] != node.output.type or types[scale[0]].shape != types[found.x].shape[-1:]:
            return None
        # Without a cast in between nothing is rounded, so either order is the same.
        round_first = rounding is not None or (root is node and node.output.type.dtype == "f32")
        return rewriter.add(
            "rms_norm", found.x, scale[0], eps=found.eps, offset=scale[1], round_first=round_first
        )
    return None


def _norm_weight(rewriter: Rewriter, name: str) -> tuple[str, float] | None:
    """The parameter and the offset of w or (offset + w), cast or not."""
    offset = 0.0
    if (shifted := rewriter.producer(name, "add")) and len(shifted.inputs) == 1:
        offset, name = float(cast("float", shifted.attribute("scalar"))), shifted.inputs[0]
    name = rewriter.through(name, "cast")
    return (name, offset) if rewriter.is_parameter(name) else None


def _plain_rms_norm(rewriter: Rewriter, node: Node) -> NewName | None:
    """normalised(x) that no weight follows."""
    name = node.inputs[0] if node.op == "cast" else node.name
    found = _normalised(rewriter, name)
    if found is None or rewriter.graph.types[found.x] != node.output.type:
        return None
    return rewriter.add("rms_norm", found.x, eps=found.eps, offset=0.0, round_first=True)


def _layer_norm(rewriter: Rewriter, node: Node) -> NewName | None:
    """w · (x - mean(x)) · rsqrt(mean((x - mean(x))²) + eps), as Cohere writes it out."""
    root = node
    if node.op == "cast" and (inner := rewriter.producer(node.inputs[0], "mul")):
        root = inner
    if root.op != "mul" or len(root.inputs) != 2:
        return None
    for weight, value in (root.inputs, root.inputs[::-1]):
        parameter = rewriter.through(weight, "cast")
        product = rewriter.producer(value, "mul")
        if not rewriter.is_parameter(parameter) or product is None or len(product.inputs) != 2:
            continue
        for centred, scale in (product.inputs, product.inputs[::-1]):
            eps = _inverse_root_mean_square(rewriter, scale, centred)
            wide = _centred(rewriter, centred)
            if eps is None or wide is None:
                continue
            x = _before_widening(rewriter, wide)
            if rewriter.graph.types[x] == node.output.type:
                return rewriter.add("layer_norm", x, parameter, eps=eps, weight=True, bias=False)
    return None


def _centred(rewriter: Rewriter, name: str) -> str | None:
    """x, where the value is x - mean(x)."""
    node = rewriter.producer(name, "sub")
    mean = node and len(node.inputs) == 2 and rewriter.producer(node.inputs[1], "mean")
    if node and mean and mean.inputs[0] == node.inputs[0] and mean.get("dim") == -1:
        return node.inputs[0]
    return None


# ------------------------------------------------------------------------------- rotary embedding


def _rope(rewriter: Rewriter, node: Node) -> NewName | None:
    """x · cos + rotate(x) · sin over the whole of x."""
    if node.op != "add" or len(node.inputs) != 2 or len(node.output.type.dims) != 3:
        return None
    products = [rewriter.producer(name, "mul") for name in node.inputs]
    if any(p is None or len(p.inputs) != 2 for p in products):
        return None
    for plain, turned in (products, products[::-1]):
        for rotated, sin in _orders(cast("Node", turned)):
            found = _rotation(rewriter, rotated)
            if found is None:
                continue
            style, x = found
            for same, cos in _orders(cast("Node", plain)):
                if same != x or not _keeps_dtype(rewriter, node, x):
                    continue
                tables = [_table(rewriter, table) for table in (cos, sin)]
                size = int(node.output.type.shape[-1])
                return rewriter.add("rope", x, *tables, style=style, rotary_dim=size)
    return None


def _keeps_dtype(rewriter: Rewriter, node: Node, x: str) -> bool:
    """Whether a node has the dtype of x, or is rounded to it by all that read it."""
    dtype = rewriter.graph.types[x].dtype
    readers = rewriter.graph.consumers.get(node.name, ())
    return node.output.type.dtype == dtype or (
        node.name not in rewriter.graph.outputs
        and all(reader.op == "cast" and reader.get("dtype") == dtype for reader in readers)
    )


def _orders(node: Node) -> tuple[tuple[str, str], tuple[str, str]]:
    a, b = node.inputs
    return (a, b), (b, a)


def _rotation(rewriter: Rewriter, name: str) -> tuple[str, str] | None:
    """Style and x, where the value is rotate(x)."""
    node = rewriter.producer(name, "concat")
    if node is not None:
        parts = [_slice_of(rewriter, part) for part in node.inputs]
        size = int(node.output.type.shape[-1])
        half = [(True, size // 2, size, 1), (False, 0, size // 2, 1)]
        if [p and p[1:] for p in parts] == half and parts[0][0] == parts[1][0]:  # type: ignore[index]
            return "half", parts[0][0]  # type: ignore[index]
        return None
    flat = rewriter.producer(name, "reshape")
    pairs = flat and rewriter.producer(flat.inputs[0], "concat")
    if not (flat and pairs):
        return None
    parts = [_slice_of(rewriter, rewriter.through(part, "reshape")) for part in pairs.inputs]
    size = int(flat.output.type.shape[-1])
    interleaved = [(True, 1, size, 2), (False, 0, size, 2)]
    if [p and p[1:] for p in parts] == interleaved and parts[0][0] == parts[1][0]:  # type: ignore[index]
        return "interleaved", parts[0][0]  # type: ignore[index]
    return None


def _slice_of(rewriter: Rewriter, name: str) -> tuple[str, bool, int, int, int] | None:
    """(x, negated, start, stop, step), where the value is ± x[..., start:stop:step]."""
    negative = rewriter.producer(name, "neg")
    node = rewriter.producer(negative.inputs[0] if negative else name, "slice")
    if node is None or node.get("dim") != -1:
        return None
    start, stop = (cast("int", node.attribute(key)) for key in ("start", "stop"))
    step = cast("int", node.get("step", 1))
    return node.inputs[0], negative is not None, start, stop, step


def _table(rewriter: Rewriter, name: str) -> str:
    """A [T, 1, n] table of cosines as [T, n]."""
    view = rewriter.producer(name, "reshape")
    shape = rewriter.graph.types[name].shape
    if view and rewriter.graph.types[view.inputs[0]].shape == (TOKENS, shape[-1]):
        return view.inputs[0]
    return rewriter.add("reshape", name, shape=(-1, int(shape[-1])))


def _partial_rope(rewriter: Rewriter, node: Node) -> NewName | None:
    """The first dims of each head turned, the rest as they are."""
    if node.op != "concat" or len(node.inputs) != 2 or node.get("dim") != -1:
        return None
    rope = rewriter.producer(node.inputs[0], "rope")
    rest = _slice_of(rewriter, node.inputs[1])
    first = rope and _slice_of(rewriter, rope.inputs[0])
    if not (rope and rest and first) or rest[0] != first[0]:
        return None
    n, size = int(rope.output.type.shape[-1]), int(node.output.type.shape[-1])
    if first[1:] != (False, 0, n, 1) or rest[1:] != (False, n, size, 1):
        return None
    return rewriter.add(
        "rope", first[0], *rope.inputs[1:], scope=node.scope, **dict(rope.attributes)
    )


# ------------------------------------------------------------------------------- activations


def _activation(rewriter: Rewriter, node: Node) -> NewName | None:
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
    """Whether the nodes compute a known activation, to a tolerance on a grid in fp64."""
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


# ------------------------------------------------------------------------------- products


def _linear_bias(rewriter: Rewriter, node: Node) -> NewName | None:
    if node.op != "add" or len(node.inputs) != 2:
        return None
    for product, bias in _orders(node):
        linear = rewriter.producer(product, "linear")
        if linear and len(linear.inputs) == 2 and rewriter.is_parameter(bias):
            shape = rewriter.graph.types[bias].shape
            if shape == node.output.type.shape[-1:] and rewriter.is_read_once(product):
                return rewriter.add("linear", *linear.inputs, bias, scope=linear.scope)
    return None


def _unrepeat_heads(rewriter: Rewriter, node: Node) -> NewName | None:
    """Attention reads each KV head once, though the model repeats it for heads that share it."""
    if node.op != "attention":
        return None
    k, v = (_before_repeat(rewriter, name) for name in node.inputs[1:3])
    if k is None or v is None:
        return None
    inputs = (node.inputs[0], k, v, *node.inputs[3:])
    names = rewriter.add_many("attention", *inputs, scope=node.scope, **dict(node.attributes))
    rewriter.new_names[node.outputs[1].name] = names[1]
    return names[0]


def _before_repeat(rewriter: Rewriter, name: str) -> str | None:
    """x [T, K, d], where the value is x with each head repeated; through rope, which commutes."""
    node = rewriter.producer(name, "reshape", "rope")
    if node is None:
        return None
    if node.op == "rope":
        x = _before_repeat(rewriter, node.inputs[0])
        rest, attributes = node.inputs[1:], dict(node.attributes)
        return x and rewriter.add("rope", x, *rest, scope="", **attributes)
    expand = rewriter.producer(node.inputs[0], "expand")
    if expand is None or len(expand.output.type.dims) != 4:
        return None
    _, kv_heads, group, size = rewriter.graph.types[expand.inputs[0]].shape
    if group != 1 or node.output.type.shape[-1] != size:
        return None
    return rewriter.add("reshape", expand.inputs[0], shape=(-1, int(kv_heads), int(size)))
