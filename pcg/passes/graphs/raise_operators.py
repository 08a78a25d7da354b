"""Raising of elementary arithmetic to the operator table's model operators.

    x · rsqrt(mean(x²) + eps) · w                 rms_norm, with its roundings and offset
    (x - mean) · rsqrt(var + eps) · w             layer_norm
    x · cos + rotate(x) · sin                     rope, half or interleaved, on a part of the head
    0.5 x (1 + tanh(…)), x sigmoid(x)             gelu, silu: recognised by their values
    linear(x, W) + b                              linear with a bias
    attention over repeated KV heads              attention over the KV heads themselves

Rules match arithmetic, never the model's name. A rule matches the old graph from a root node down
and adds the replacement to the new graph; unused nodes are removed. Rules see only the old graph,
so if two rules match the same root, the first applies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TypeAlias, cast

from pcg.ir.analysis.builder import Builder
from pcg.ir.graph import Attribute, Graph, Node
from pcg.ir.operators import operator
from pcg.ir.program.program import ModelGraph
from pcg.ir.types import TOKENS
from pcg.passes.graphs.pass_base import ModelPass, readable_names

# ----------------------------------------------------------------------------------------- rewriter


class NewName(str):
    """A value's name in the new graph, accepted where names of the old graph are."""

    __slots__ = ()


class Rewriter:
    """The old graph, as rules see it, and the new graph under construction."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.builder = Builder.extending(graph.replace(nodes=()))
        self.new_names: dict[str, NewName] = {}
        self._scope = ""

    def producer(self, name: str, *ops: str) -> Node | None:
        """Return the node that computes a value, if its operator is one of `ops`."""
        node = self.graph.producers.get(name)
        return node if node is not None and node.op in ops else None

    def is_read_once(self, name: str) -> bool:
        return len(self.graph.consumers.get(name, ())) == 1 and name not in self.graph.outputs

    def through(self, name: str, *ops: str) -> str:
        """Return the source of a chain of these single-input operators."""
        while (node := self.producer(name, *ops)) is not None:
            name = node.inputs[0]
        return name

    def is_parameter(self, name: str) -> bool:
        return name in self.graph.parameters_by_name

    def add(self, op: str, *inputs: str, scope: str = "", **attributes: Attribute) -> NewName:
        return self.add_many(op, *inputs, scope=scope, **attributes)[0]

    def add_many(
        self, op: str, *inputs: str, scope: str = "", **attributes: Attribute
    ) -> tuple[NewName, ...]:
        names = [str(self.new(name)) for name in inputs]
        added = self.builder.add_many(op, names, name=op, scope=scope or self._scope, **attributes)
        return tuple(map(NewName, added))

    def new(self, name: str) -> NewName:
        return name if isinstance(name, NewName) else self.new_names.get(name, NewName(name))

    def run(self, rules: Sequence[Rule]) -> Graph:
        for node in self.graph.nodes:
            self._scope = node.scope
            replacements = (new for rule in rules if (new := rule(self, node)) is not None)
            replacement = next(replacements, None)
            if replacement is None:
                names = self.add_many(node.op, *node.inputs, scope="", **dict(node.attributes))
                for old, new in zip(node.outputs, names, strict=True):
                    self.new_names[old.name] = new
            else:
                self.new_names[node.name] = replacement
        return self.builder.build([str(self.new(name)) for name in self.graph.outputs])


Rule: TypeAlias = Callable[[Rewriter, Node], NewName | None]


def rewrite(graph: Graph, rules: Sequence[Rule]) -> Graph:
    """Apply the rules until no rule matches."""
    while True:
        new = Rewriter(graph).run(rules)
        if len(new.nodes) == len(graph.nodes):
            return new
        graph = new


def orders(node: Node | None) -> tuple[tuple[str, str], ...]:
    """Return a node's two inputs in both orders; empty for other numbers of inputs."""
    if node is None or len(node.inputs) != 2:
        return ()
    a, b = node.inputs
    return (a, b), (b, a)


# -------------------------------------------------------------------------------------------- norms


def _normalised(rewriter: Rewriter, name: str) -> tuple[str, float] | None:
    """Match x / sqrt(mean(x²) + eps): return (x before its cast to fp32, eps), or None."""
    for wide, scale in orders(rewriter.producer(name, "mul")):
        eps = _inverse_root_mean_square(rewriter, scale, wide)
        if eps is not None:
            return _before_widening(rewriter, wide), eps
    return None


def _inverse_root_mean_square(rewriter: Rewriter, name: str, wide: str) -> float | None:
    """Match rsqrt(mean(wide²) + eps): return eps, or None."""
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


def rms_norm(rewriter: Rewriter, node: Node) -> NewName | None:
    """Match W · normalised(x), with any order of roundings."""
    types = rewriter.graph.types
    for weight, value in _factors(rewriter, node):
        rounding = rewriter.producer(value, "cast")
        normalised = _normalised(rewriter, rounding.inputs[0] if rounding else value)
        scale = _norm_weight(rewriter, weight)
        if normalised is None or scale is None:
            continue
        (x, eps), (parameter, offset) = normalised, scale
        if types[x] != node.output.type or types[parameter].shape != types[x].shape[-1:]:
            return None
        # Without a cast in between, nothing is rounded, so both orders are equal.
        first = rounding is not None or (node.op == "mul" and node.output.type.dtype == "f32")
        return rewriter.add("rms_norm", x, parameter, eps=eps, offset=offset, round_first=first)
    return None


def _factors(rewriter: Rewriter, node: Node) -> tuple[tuple[str, str], ...]:
    return orders(rewriter.producer(node.inputs[0] if node.op == "cast" else node.name, "mul"))


def _norm_weight(rewriter: Rewriter, name: str) -> tuple[str, float] | None:
    """Return the parameter and the offset of w or (offset + w), with or without a cast."""
    offset = 0.0
    if (shifted := rewriter.producer(name, "add")) and len(shifted.inputs) == 1:
        offset, name = float(cast("float", shifted.attribute("scalar"))), shifted.inputs[0]
    name = rewriter.through(name, "cast")
    return (name, offset) if rewriter.is_parameter(name) else None


def plain_rms_norm(rewriter: Rewriter, node: Node) -> NewName | None:
    """Match normalised(x) without a weight."""
    name = node.inputs[0] if node.op == "cast" else node.name
    normalised = _normalised(rewriter, name)
    if normalised is None or rewriter.graph.types[normalised[0]] != node.output.type:
        return None
    return rewriter.add("rms_norm", normalised[0], eps=normalised[1], offset=0.0, round_first=True)


def layer_norm(rewriter: Rewriter, node: Node) -> NewName | None:
    """Match W · (x - mean(x)) · rsqrt(mean((x - mean(x))²) + eps), Cohere's elementary form."""
    for weight, value in _factors(rewriter, node):
        parameter = rewriter.through(weight, "cast")
        if not rewriter.is_parameter(parameter):
            continue
        for centred, scale in orders(rewriter.producer(value, "mul")):
            eps = _inverse_root_mean_square(rewriter, scale, centred)
            wide = _centred(rewriter, centred)
            if eps is None or wide is None:
                continue
            x = _before_widening(rewriter, wide)
            if rewriter.graph.types[x] == node.output.type:
                return rewriter.add("layer_norm", x, parameter, eps=eps, weight=True, bias=False)
    return None


def _centred(rewriter: Rewriter, name: str) -> str | None:
    """Match x - mean(x): return x, or None."""
    node = rewriter.producer(name, "sub")
    mean = node and len(node.inputs) == 2 and rewriter.producer(node.inputs[1], "mean")
    if node and mean and mean.inputs[0] == node.inputs[0] and mean.get("dim") == -1:
        return node.inputs[0]
    return None


# ------------------------------------------------------------------------------------------- rotary


def rope(rewriter: Rewriter, node: Node) -> NewName | None:
    """Match X · cos + rotate(x) · sin over the whole of x."""
    if node.op != "add" or len(node.output.type.dims) != 3:
        return None
    for plain, turned in orders(node):
        for rotated, sin in orders(rewriter.producer(turned, "mul")):
            rotation = _rotation(rewriter, rotated)
            if rotation is None:
                continue
            style, x = rotation
            for same, cos in orders(rewriter.producer(plain, "mul")):
                if same != x or not _keeps_dtype(rewriter, node, x):
                    continue
                tables = [_table(rewriter, table) for table in (cos, sin)]
                size = int(node.output.type.shape[-1])
                return rewriter.add("rope", x, *tables, style=style, rotary_dim=size)
    return None


def _keeps_dtype(rewriter: Rewriter, node: Node, x: str) -> bool:
    """Return whether a node has the dtype of x, or all its readers cast it to that dtype."""
    dtype = rewriter.graph.types[x].dtype
    readers = rewriter.graph.consumers.get(node.name, ())
    return node.output.type.dtype == dtype or (
        node.name not in rewriter.graph.outputs
        and all(reader.op == "cast" and reader.get("dtype") == dtype for reader in readers)
    )


def _rotation(rewriter: Rewriter, name: str) -> tuple[str, str] | None:
    """Match rotate(x): return style and x, or None."""
    pairs = rewriter.producer(name, "reshape")
    joined = rewriter.producer(pairs.inputs[0] if pairs else name, "concat")
    if joined is None:
        return None
    size = int(rewriter.graph.types[name].shape[-1])
    if pairs:
        parts = [rewriter.through(part, "reshape") for part in joined.inputs]
        style, turned = "interleaved", [(True, 1, size, 2), (False, 0, size, 2)]
    else:
        parts = [*joined.inputs]
        style, turned = "half", [(True, size // 2, size, 1), (False, 0, size // 2, 1)]
    slices = [_slice_of(rewriter, part) for part in parts]
    sources = {sliced[0] for sliced in slices if sliced}
    if len(sources) == 1 and [sliced and sliced[1:] for sliced in slices] == turned:
        return style, sources.pop()
    return None


def _slice_of(rewriter: Rewriter, name: str) -> tuple[str, bool, int, int, int] | None:
    """Match ± x[..., start:stop:step]: return (x, negated, start, stop, step), or None."""
    negative = rewriter.producer(name, "neg")
    node = rewriter.producer(negative.inputs[0] if negative else name, "slice")
    if node is None or node.get("dim") != -1:
        return None
    start, stop = (cast("int", node.attribute(key)) for key in ("start", "stop"))
    step = cast("int", node.get("step", 1))
    return node.inputs[0], negative is not None, start, stop, step


def _table(rewriter: Rewriter, name: str) -> str:
    """Return a [T, 1, n] table of cosines as [T, n]."""
    view = rewriter.producer(name, "reshape")
    shape = rewriter.graph.types[name].shape
    if view and rewriter.graph.types[view.inputs[0]].shape == (TOKENS, shape[-1]):
        return view.inputs[0]
    return rewriter.add("reshape", name, shape=(-1, int(shape[-1])))


def partial_rope(rewriter: Rewriter, node: Node) -> NewName | None:
    """Match a rope over the first dims of each head, with the other dims unchanged."""
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


# -------------------------------------------------------------------------------------- activations


def activation(rewriter: Rewriter, node: Node) -> NewName | None:
    """Match an expanded product that equals gelu(x) or silu(x) by value."""
    if node.op != "mul" or len(node.inputs) != 2:
        return None
    nodes, leaves = _elementwise_cone(rewriter, node)
    ops = {n.op for n in nodes}
    if len(leaves) != 1 or not ops & {"tanh", "sigmoid", "pointwise"}:
        return None
    (leaf,) = leaves
    if rewriter.graph.types[leaf] != node.output.type:
        return None
    # BLOOM has √(2/π) to eight digits: gelu in fp32, a different function in fp64.
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
    """Return the arithmetic between a node and its leaves, within a single activation."""
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


# ---------------------------------------------------------------------------------- raise operators


class RaiseOperators(ModelPass):
    """Rewrite a model with fewer, larger operators and readable names."""

    name = "raise"

    def run(self, before: ModelGraph) -> ModelGraph:
        prologue = raise_graph(before.prologue)
        shared = dict(zip(before.prologue.outputs, prologue.outputs, strict=True))
        return ModelGraph(
            prologue,
            tuple(raise_graph(block, shared) for block in before.blocks),
            before.layers,
            raise_graph(before.epilogue, shared),
        )


def raise_graph(graph: Graph, inputs: Mapping[str, str] | None = None) -> Graph:
    """Rewrite a graph with fewer, larger operators; `inputs` renames inputs."""
    graph = rewrite(graph, (_drop_identity, _join_reshapes))
    graph = rewrite(graph, (layer_norm, rms_norm, _linear_bias, rope, activation))
    graph = rewrite(graph, (plain_rms_norm, partial_rope, _drop_identity, _join_reshapes))
    graph = rewrite(graph, (_unrepeat_heads, _mark_router, _drop_identity, _join_reshapes))
    return graph.renamed(readable_names(graph, inputs))


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


def _linear_bias(rewriter: Rewriter, node: Node) -> NewName | None:
    if node.op != "add":
        return None
    for product, bias in orders(node):
        linear = rewriter.producer(product, "linear")
        if linear and len(linear.inputs) == 2 and rewriter.is_parameter(bias):
            type_, output_type = rewriter.graph.types[bias], linear.output.type
            is_bias = type_.shape == output_type.shape[-1:] and type_.dtype == output_type.dtype
            if is_bias and rewriter.is_read_once(product):
                return rewriter.add("linear", *linear.inputs, bias, scope=linear.scope)
    return None


def _unrepeat_heads(rewriter: Rewriter, node: Node) -> NewName | None:
    """Let attention read each KV head once if the model repeats KV heads."""
    if node.op != "attention":
        return None
    k, v = (_before_repeat(rewriter, name) for name in node.inputs[1:3])
    if k is None or v is None:
        return None
    inputs = (node.inputs[0], k, v, *node.inputs[3:])
    names = rewriter.add_many("attention", *inputs, scope=node.scope, **dict(node.attributes))
    rewriter.new_names[node.outputs[1].name] = names[1]
    return names[0]


def _mark_router(rewriter: Rewriter, node: Node) -> NewName | None:
    """Mark the top-k whose indices are experts."""
    if node.op != "topk" or node.get("routes"):
        return None
    chosen = node.outputs[1].name
    experts = (n for n in rewriter.graph.nodes if n.op == "expert_linear")
    if all(rewriter.through(n.inputs[1], "cast", "reshape") != chosen for n in experts):
        return None
    attributes = {**dict(node.attributes), "routes": True}
    names = rewriter.add_many("topk", *node.inputs, scope=node.scope, **attributes)
    rewriter.new_names[chosen] = names[1]
    return names[0]


def _before_repeat(rewriter: Rewriter, name: str) -> str | None:
    """Match x [T, K, d] with each head repeated, also through rope, which commutes: return x."""
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
