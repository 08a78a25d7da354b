"""Fuse a frozen head with its loss: logits are computed and freed some tokens at a time.

    z = x Wᵀ (+ b)                      dl = dloss (softmax(l) - onehot)
    l = scale · z, or                   dz = the same factors back
    l = cap · tanh(z · scale / cap)     dx = dz W
    loss = -log softmax(l)[target]

become one operator, `linear_cross_entropy`. A graph whose head has a bypass network, or does more
to its logits, stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pcg.ir.graph import Graph, Node
from pcg.passes.pass_base import GraphPass


class FuseLoss(GraphPass):
    """Put a head and its loss, with the gradient where there is one, in one operator."""

    name = "fuse_loss"

    def run(self, before: Graph) -> Graph:
        by_op = {node.op: node for node in reversed(before.nodes)}
        loss, back = by_op.get("cross_entropy"), by_op.get("cross_entropy_backward")
        if loss is None:
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
        # At the head's place, whose inputs are all there; what only the old ones read is dead.
        nodes = [new for node in kept for new in ((fused, node) if node is head else (node,))]
        return before.replace(nodes=tuple(nodes)).without_dead_code()


def _chain(graph: Graph, value: str, through: tuple[str, ...]) -> Iterator[Node]:
    """The nodes that a value comes from, back through unary ones to the first of another kind."""
    while True:
        node = graph.producers[value]
        yield node
        if node.op not in through or len(node.inputs) != 1:
            return
        value = node.inputs[0]


def _scale_and_cap(factors: Iterable[Node]) -> tuple[float, float] | None:
    """Scale and soft cap of the logits, as some operators make them; None for anything else."""
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
    found = [graph.parameters_by_name.get(name) for name in head.inputs[1:]]
    return all(parameter is not None and parameter.role != "adapter" for parameter in found)


def _linear_backward(graph: Graph, back: Node, logits: str, head: Node) -> Node | None:
    """The node that makes the gradient of the head's input, if of the loss alone; else None."""
    if back.inputs[1] != logits:
        return None
    for node in graph.nodes:
        if node.op == "linear_backward" and node.inputs[1] == head.inputs[1]:
            value = node.inputs[0]
            while (made := graph.producers.get(value)) is not None and made is not back:
                if made.op not in ("mul", "div", "tanh_backward"):
                    return None
                value = made.inputs[0]
            return node if made is back else None
    return None
