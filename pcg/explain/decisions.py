"""Decisions on the tensors of a layer: save, compress, recompute or drop, each with a reason."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any

import sympy

from pcg.explain.report.report_data import GraphNode, SavedTensor
from pcg.explain.step_memory import bytes_at, formula_text
from pcg.ir.analysis.storages import SEQUENCES, TOKENS_OF_BATCH, Storage, Storages
from pcg.ir.graph import Graph, Node
from pcg.ir.operators import OPERATORS, operator
from pcg.ir.operators.experts import PackRows
from pcg.ir.operators.lossy import Encoder
from pcg.ir.program.program import TrainingGraph
from pcg.ir.types import CONTEXT, TORCH_NAMES, TensorType, tokens_at
from pcg.passes.graphs.differentiate import LayerKind

_BELOW = "nothing is trained in the layer or below it: it has no backward"


def decisions(
    kind: LayerKind, plan: TrainingGraph, layers: int, at: Mapping[sympy.Symbol, int]
) -> Iterator[SavedTensor]:
    """Yield the decision on each tensor of a layer, in the graph's order, without views."""
    graph = kind.gradients.graph
    packs = tuple(node for node in plan.forward.nodes if node.op == PackRows.name)
    graph = graph.replace(nodes=(*graph.nodes, *packs))
    storages = Storages.of(graph)
    saved = {storages[name].name for name in plan.saved}
    readers = _readers(plan.backward)
    recomputed = set() if plan.backward is None else set(plan.backward.producers)
    prefix = plan.forward.name.removesuffix("_forward")
    for name in graph.types:
        storage = storages[name]
        if storage.name != name or storage.is_parameter:
            continue
        if name in saved:
            word = "compress" if _is_encoded(storage) else "save"
            reason = _why_saved(storage, kind, plan, saved)
        elif name in recomputed:
            word, reason = "recompute", _why_recomputed(graph, graph.producers[name])
        else:
            word = "drop"
            reason = _why_dropped(graph, name, saved) if plan.backward else _BELOW
        yield SavedTensor(
            f"{prefix}.{name}",
            storage.op,
            **sizes_at(storage.type, storage.size_bytes(TOKENS_OF_BATCH), at),
            needed_by=readers.get(name, ()),
            decision=word,
            reason=reason,
            layers=layers,
        )


def sizes_at(
    type_: TensorType, size_bytes: sympy.Expr, at: Mapping[sympy.Symbol, int]
) -> dict[str, Any]:
    """Return the shape, dtype and bytes fields of a `SavedTensor`."""
    leading: tuple[int, ...] = ()
    if type_.is_token_wise:
        leading = (int(tokens_at(type_.shape[0], at[SEQUENCES] * at[CONTEXT])),)
    return {
        "shape": leading + type_.features,
        "dtype": TORCH_NAMES[type_.dtype],
        "bytes": bytes_at(size_bytes, at),
        "formula": formula_text(size_bytes),
    }


def decided_graph(
    kind: LayerKind, plan: TrainingGraph, at: Mapping[sympy.Symbol, int]
) -> tuple[GraphNode, ...]:
    """Return the inputs and nodes of a layer's forward, in order, with decisions on their tensors.

    Weights and views are left out; the reader of a view reads the view's storage.
    """
    graph = plan.forward
    storages = Storages.of(graph)
    rows = decisions(kind, plan, 1, at)
    decided = {row.tensor.partition(".")[2]: row.decision for row in rows}
    used = {storages[name].name for node in graph.nodes for name in node.inputs}
    graph_nodes = [
        GraphNode(value.name, "input", "", (), decided[value.name])
        for value in graph.inputs
        if value.name in used
    ]
    makers = {value.name: node.name for node in graph.nodes for value in node.outputs}
    for node in graph.nodes:
        if storages[node.name].name != node.name:
            continue
        roots = [storages[name] for name in node.inputs]
        read = [makers.get(root.name, root.name) for root in roots if not root.is_parameter]
        inputs = tuple(dict.fromkeys(read))
        graph_nodes.append(GraphNode(node.name, node.op, node.scope, inputs, decided[node.name]))
    return tuple(graph_nodes)


def _readers(backward: Graph | None) -> dict[str, tuple[str, ...]]:
    """Return the backward nodes that read each storage; views do not count as readers."""
    if backward is None:
        return {}
    storages = Storages.of(backward)
    readers: dict[str, dict[str, None]] = {}
    for node in backward.nodes:
        if storages[node.name].name != node.name:
            continue
        for name in node.inputs:
            root = storages[name].name
            text = f"{node.op} ({node.scope})" if node.scope else node.op
            readers.setdefault(root, {})[text] = None
    return {root: tuple(texts) for root, texts in readers.items()}


def _is_encoded(storage: Storage) -> bool:
    packs = ("pack_signs", PackRows.name)
    return storage.op in packs or isinstance(OPERATORS.get(storage.op), Encoder)


def _why_saved(
    storage: Storage, kind: LayerKind, plan: TrainingGraph, saved: Container[str]
) -> str:
    if storage.op == "input":
        if storage.name in kind.shared:
            return "saved once for all layers, which share it"
        return "the layer's input: nothing in the layer computes it"
    if storage.op == "pack_signs":
        return "backward reads one bit an element of it"
    if storage.op == PackRows.name:
        return "at most: only the rows of the rank's experts are saved"
    entry = OPERATORS.get(storage.op)
    if isinstance(entry, Encoder) and plan.backward is not None:
        maker = kind.gradients.graph.producers[storage.name]
        if maker.name != storage.name:
            return f"the data that blocks of {maker.name} share"
        return f"{entry.error}, max over a block: {', '.join(_bounds(plan.backward, storage.name))}"
    product = _product_behind(kind.gradients.graph, storage.name, saved)
    if product is None:
        return "fewer bytes than the tensors that recompute it"
    return f"recomputing it takes {_work(product)}"


def _bounds(backward: Graph, codes: str) -> dict[str, None]:
    """Return the effect of an error e of an encoded value on each reader of its decoded value."""
    (decoder,) = backward.consumers[codes]
    bounded: dict[str, None] = {}
    for node in backward.consumers[decoder.name]:
        entry = operator(node.op)
        for index, name in enumerate(node.inputs):
            for bounds in (entry.bounded_in, entry.row_bounded_in, entry.finely_bounded_in):
                if name == decoder.name and index in bounds:
                    bounded[f"{node.op} by {bounds[index]}"] = None
    return bounded


def _product_behind(graph: Graph, name: str, saved: Container[str]) -> Node | None:
    """Return the last product between the saved tensors and a value."""
    node = graph.producers.get(name)
    if node is None or operator(node.op).is_product:
        return node
    behind = (n for n in node.inputs if n not in saved)
    return next((p for n in behind if (p := _product_behind(graph, n, saved)) is not None), None)


def _why_recomputed(graph: Graph, maker: Node) -> str:
    parameters = graph.parameters_by_name
    sources = [name for name in dict.fromkeys(maker.inputs) if name not in parameters]
    text = f"recomputed from {', '.join(sources)}" if sources else "recomputed from weights alone"
    if maker.op == "gathered_copy":
        return f"{text}: the ranks' parts of the tokens are gathered once more"
    if operator(maker.op).is_product:
        return f"{text} by {_work(maker)}, which the budget allows"
    return f"{text} without a matrix product"


def _why_dropped(graph: Graph, name: str, saved: Container[str]) -> str:
    for node in graph.consumers.get(name, ()):
        before_weight = graph.consumers.get(node.name, ()) if node.op == "standardized" else ()
        for maker in (node, *before_weight):
            is_code = maker.op == "pack_signs" or isinstance(operator(maker.op), Encoder)
            if is_code and maker.name in saved:
                return f"{maker.name} is saved instead"
    frozen = [n for n in graph.consumers.get(name, ()) if n.op == "linear"]
    if frozen:
        return f"the weight that it meets in {frozen[0].scope} is frozen: no gradient reads it"
    return "no gradient reads it"


def _work(maker: Node) -> str:
    if operator(maker.op).sees_sequences:
        return "attention"
    return f"the product of {maker.scope or maker.op}"
