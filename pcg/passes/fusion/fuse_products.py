"""Fusion of products: those of the same input, with their LoRA, and the head with its loss.

    q = x Wqᵀ,  k = x Wkᵀ,  v = x Wvᵀ                          q, k, v = x [Wq; Wk; Wv]ᵀ
    y = x Wᵀ,  s = shrink(x, A),  z = expand_add(y, s, B)      z = lora_linear(x, W, A, B)

The runtime joins the base's weights once at load, and the adapters' weights when they enter a
batch. Training and serving fuse the same products, so that both can share a product. Only some of
the joined linear operators may have LoRA, for example q and v, but not k.

A frozen head and its loss become `linear_cross_entropy`, which computes and frees logits in chunks
of tokens:

    z = x Wᵀ (+ b)                      dl = dloss (softmax(l) - onehot)
    l = scale · z, or                   dz = dl by the factors' derivatives
    l = cap · tanh(z · scale / cap)     dx = dz W
    loss = -log softmax(l)[target]

A head with a bypass network, or with other operators on its logits, stays unchanged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import takewhile

from pcg.formats.registry import FORMATS
from pcg.ir.graph import Graph, Node
from pcg.kernels.sizes import ROW_ALIGNMENT
from pcg.passes.graphs.pass_base import GraphPass

# ------------------------------------------------------------------------------------- fuse linears


class FuseLinears(GraphPass):
    """Join linear operators of the same input, at the place of the first."""

    name = "fuse_linears"

    def run(self, before: Graph) -> Graph:
        groups: dict[tuple[str, int, bool, bool], list[Node]] = {}
        # A weight that two products read is not joined.
        products = Counter(node.inputs[1] for node in before.nodes if node.op == "linear")
        for node in before.nodes:
            if (
                node.op == "linear"
                and products[node.inputs[1]] == 1
                and all(name in before.parameters_by_name for name in node.inputs[1:])
            ):
                # Quantized weights and float ones are multiplied by different functions.
                is_quantized = before.types[node.inputs[1]].dtype in FORMATS
                # Kernels load the parts of a joined row 16 bytes at a time.
                is_aligned = node.output.type.features[-1] % ROW_ALIGNMENT == 0
                key = node.inputs[0], len(node.inputs), is_quantized, is_aligned
                groups.setdefault(key, []).append(node)
        joined = {nodes[0].name: _joined(nodes) for nodes in groups.values() if len(nodes) > 1}
        dropped = {node.name for nodes in groups.values() for node in nodes[1:]}
        nodes = tuple(joined.get(n.name, n) for n in before.nodes if n.name not in dropped)
        return before.replace(nodes=nodes)


def _joined(nodes: list[Node]) -> Node:
    weights = tuple(node.inputs[1] for node in nodes)
    biases = tuple(node.inputs[2] for node in nodes if len(node.inputs) == 3)
    return Node(
        "linear_group",
        (nodes[0].inputs[0], *weights, *biases),
        tuple(node.output for node in nodes),
        (("bias", bool(biases)), ("count", len(nodes))),
        _common_scope(nodes),
    )


def _common_scope(nodes: list[Node]) -> str:
    levels = zip(*(node.scope.split(".") for node in nodes), strict=False)
    return ".".join(level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels))


# ---------------------------------------------------------------------------------------- fuse lora


class FuseLora(GraphPass):
    """Fuse linear operators with their LoRA, if any of their outputs has LoRA."""

    name = "fuse_lora"

    def run(self, before: Graph) -> Graph:
        new: dict[str, Node] = {}
        dropped: set[str] = set()
        for node in before.nodes:
            if node.op not in ("linear", "linear_group"):
                continue
            pairs = _loras_of(before, node)
            if not pairs:
                continue
            shrinks, expands = zip(*pairs.values(), strict=True)
            count = len(node.outputs)
            biased = len(node.inputs) == 1 + 2 * count
            adapted = (("adapted", tuple(pairs)),) if len(pairs) < count else ()
            # At the place of the base's product, where all inputs are available.
            new[node.name] = Node(
                "lora_linear",
                (*node.inputs, *(n.inputs[1] for n in shrinks), *(n.inputs[2] for n in expands)),
                tuple(pairs[i][1].output if i in pairs else y for i, y in enumerate(node.outputs)),
                (*adapted, ("bias", biased), ("count", count)),
                node.scope,
            )
            dropped |= {n.name for n in (*shrinks, *expands)}
        nodes = tuple(new.get(n.name, n) for n in before.nodes if n.name not in dropped)
        return before.replace(nodes=nodes)


def _loras_of(graph: Graph, node: Node) -> dict[int, tuple[Node, Node]]:
    """Return the shrink and expand_add of each output with LoRA, if no other node reads the s."""
    pairs = {
        i: pair
        for i, value in enumerate(node.outputs)
        if (pair := _lora_of(graph, node.inputs[0], value.name)) is not None
    }
    expands = {expand.name for _, expand in pairs.values()}
    # Outputs split over ranks share s, and collectives may precede some of them.
    return {
        i: (shrink, expand)
        for i, (shrink, expand) in pairs.items()
        if all(reader.name in expands for reader in graph.consumers[shrink.name])
    }


def _lora_of(graph: Graph, x: str, y: str) -> tuple[Node, Node] | None:
    """Return the shrink of x and the expand_add onto y, if y has no other reader."""
    readers = graph.consumers.get(y, ())
    if y in graph.outputs or len(readers) != 1:
        return None
    if readers[0].op != "expand_add" or readers[0].inputs[0] != y:
        return None
    shrink = graph.producers.get(readers[0].inputs[1])
    if shrink is None or shrink.op != "shrink" or shrink.inputs[0] != x:
        return None
    return shrink, readers[0]


# ---------------------------------------------------------------------------------------- fuse loss


class FuseLoss(GraphPass):
    """Fuse a head with its loss, and with the gradient if any."""

    name = "fuse_loss"

    def run(self, before: Graph) -> Graph:
        by_op = {node.op: node for node in reversed(before.nodes)}
        loss, back = by_op.get("cross_entropy"), by_op.get("cross_entropy_backward")
        if loss is None or loss.get("smoothing"):  # which the kernel of the loss has not
            return before
        logits, targets = loss.inputs
        *factors, head = _chain(before, logits, ("mul", "div", "tanh"))
        shape = _scale_and_cap(reversed(factors))
        if head.op != "linear" or shape is None or not _is_frozen(before, head):
            return before
        inputs, outputs = [*head.inputs, targets], [loss.output]
        if back is not None:
            last = _linear_backward(before, back, logits, head)
            if last is None:
                return before
            inputs.append(back.inputs[0])
            outputs.append(last.output)
        scale, softcap = shape
        attributes = (("bias", len(head.inputs) == 3), ("scale", scale), ("softcap", softcap))
        operands = (tuple(inputs), tuple(outputs))
        fused = Node("linear_cross_entropy", *operands, attributes, head.scope)
        kept = [node for node in before.nodes if node.output not in outputs]
        # At the head's place, where all inputs are available; old nodes without readers are
        # dropped.
        nodes = [new for node in kept for new in ((fused, node) if node is head else (node,))]
        return before.replace(nodes=tuple(nodes)).without_dead_code()


def _chain(graph: Graph, value: str, through: tuple[str, ...]) -> Iterator[Node]:
    """Yield the nodes before a value, through unary operators to the first other operator."""
    while True:
        node = graph.producers[value]
        yield node
        if node.op not in through or len(node.inputs) != 1:
            return
        value = node.inputs[0]


def _scale_and_cap(factors: Iterable[Node]) -> tuple[float, float] | None:
    """Return scale and soft cap of the logits; None for other operators."""
    before, after, tanhs = 1.0, 1.0, 0
    for node in factors:
        if node.op == "tanh":
            tanhs += 1
            continue
        if node.get("reversed"):
            return None
        scalar = float(node.attribute("scalar"))  # type: ignore[arg-type]
        factor = scalar if node.op == "mul" else 1.0 / scalar
        if tanhs:
            after *= factor
        else:
            before *= factor
    if not tanhs:
        return before, 0.0
    return (before * after, after) if tanhs == 1 else None


def _is_frozen(graph: Graph, head: Node) -> bool:
    """Return whether the kernel of the loss reads the head: a float matrix of the base."""
    parameters = [graph.parameters_by_name.get(name) for name in head.inputs[1:]]
    return all(
        parameter is not None
        and parameter.role != "adapter"
        and parameter.type.dtype not in FORMATS
        for parameter in parameters
    )


def _linear_backward(graph: Graph, back: Node, logits: str, head: Node) -> Node | None:
    """Return the node that computes the head's input gradient, if only the loss contributes."""
    if back.inputs[1] != logits:
        return None
    for node in graph.nodes:
        if node.op == "linear_backward" and node.inputs[1] == head.inputs[1]:
            value = node.inputs[0]
            while (maker := graph.producers.get(value)) is not None and maker is not back:
                if maker.op not in ("mul", "div", "tanh_backward"):
                    return None
                value = maker.inputs[0]
            return node if maker is back else None
    return None
