"""Say of every tensor of a layer what becomes of it: save, compress, recompute or drop, and why."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass

import sympy

from pcg.ir.analysis.storages import TOKENS_OF_BATCH, Storage, Storages
from pcg.ir.graph import Graph, Node
from pcg.ir.operators import operator
from pcg.ir.program.program import TrainingGraph
from pcg.ir.types import TensorType
from pcg.passes.layer_kind import LayerKind


@dataclass(frozen=True)
class Decision:
    """What becomes of one tensor between forward and backward.

    Attributes:
        tensor: its plan and value, as `block_0.q_proj`.
        op: the operator that makes it; "input" for what the layer is given.
        type: of the tensor.
        size_bytes: that it takes where it is kept; a formula in B and S.
        needed_by: nodes of the emitted backward that read it, by operator and module.
        decision: save, compress, recompute or drop.
        reason: why.
        layers: how many of it there are.
    """

    tensor: str
    op: str
    type: TensorType
    size_bytes: sympy.Expr
    needed_by: tuple[str, ...]
    decision: str
    reason: str
    layers: int


def decisions(kind: LayerKind, plan: TrainingGraph, layers: int) -> Iterator[Decision]:
    """What becomes of each tensor of a layer, in the order of its graph; views are no tensors.

    Args:
        kind: of the layer.
        plan: how it is trained.
        layers: how many layers are trained so.
    """
    graph = kind.gradients.graph
    storages = Storages.of(graph)
    kept = {storages[name].name for name in plan.saved}
    readers = _readers(plan.backward)
    made_again = set() if plan.backward is None else set(plan.backward.producers)
    prefix = plan.forward.name.removesuffix("_forward")
    for name in graph.types:
        storage = storages[name]
        if storage.name != name or storage.is_parameter:
            continue
        needed_by = readers.get(name, ())
        if name in kept:
            word = "compress" if storage.op == "pack_signs" else "save"
            reason = _why_kept(storage, kind, kept)
        elif name in made_again:
            word, reason = "recompute", _why_made_again(graph, graph.producers[name])
        else:
            word, reason = "drop", _why_dropped(graph, name, kept)
        yield Decision(
            f"{prefix}.{name}",
            storage.op,
            storage.type,
            storage.size_bytes(TOKENS_OF_BATCH),
            needed_by,
            word,
            reason,
            layers,
        )


def _readers(backward: Graph | None) -> dict[str, tuple[str, ...]]:
    """For each storage, the nodes of backward that read it; a view of it reads nothing."""
    if backward is None:
        return {}
    own = Storages.of(backward)
    found: dict[str, dict[str, None]] = {}
    for node in backward.nodes:
        if own[node.name].name != node.name:
            continue
        for name in node.inputs:
            root = own[name].name
            text = f"{node.op} ({node.scope})" if node.scope else node.op
            found.setdefault(root, {})[text] = None
    return {root: tuple(texts) for root, texts in found.items()}


def _why_kept(storage: Storage, kind: LayerKind, kept: Container[str]) -> str:
    if storage.op == "input":
        if storage.name in kind.shared:
            return "kept once for all layers, which share it"
        return "the layer's input: nothing in the layer makes it"
    if storage.op == "pack_signs":
        return "one bit an element says all that backward reads of it"
    product = _product_behind(kind.gradients.graph, storage.name, kept)
    if product is None:
        return "fewer bytes than what it would be made from"
    return f"making it again takes {_work(product)}"


def _product_behind(graph: Graph, name: str, kept: Container[str]) -> Node | None:
    """The nearest product that making a value again would take, from what else is kept."""
    node = graph.producers.get(name)
    if node is None or operator(node.op).is_product:
        return node
    behind = (n for n in node.inputs if n not in kept)
    return next((p for n in behind if (p := _product_behind(graph, n, kept)) is not None), None)


def _why_made_again(graph: Graph, maker: Node) -> str:
    parameters = graph.parameters_by_name
    sources = [name for name in dict.fromkeys(maker.inputs) if name not in parameters]
    text = f"made again from {', '.join(sources)}" if sources else "made again from weights alone"
    if maker.op == "gathered_copy":
        return f"{text}: the ranks' parts of the tokens are gathered once more"
    if operator(maker.op).is_product:
        return f"{text} by {_work(maker)}, which the budget allows"
    return f"{text} without a matrix product"


def _why_dropped(graph: Graph, name: str, kept: Container[str]) -> str:
    for node in graph.consumers.get(name, ()):
        if node.op == "pack_signs" and node.name in kept:
            return f"{node.name} is kept instead"
    frozen = [n for n in graph.consumers.get(name, ()) if n.op == "linear"]
    if frozen:
        return f"the weight that it meets in {frozen[0].scope} is frozen: no gradient reads it"
    return "no gradient reads it"


def _work(maker: Node) -> str:
    if operator(maker.op).sees_sequences:
        return "attention"
    return f"the product of {maker.scope or maker.op}"
