"""Forwards that save values, and backwards that recompute the others.

Rows of choices are zeros but for those of a rank's experts, of which the rank saves the rows alone:

    forward    y = expert_linear(x, e, W)     p = pack_rows(y, e), which is saved
    backward   y = unpack_rows(p, e)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from pcg.ir.analysis.builder import Builder
from pcg.ir.graph import Graph, Node, Value
from pcg.ir.operators.collectives import OwnPart, TakenPart
from pcg.ir.program.interfaces import gradient_name
from pcg.ir.program.program import TrainingGraph
from pcg.passes.graphs.differentiate import Differentiated, LayerKind
from pcg.passes.graphs.gradients import uncompressed
from pcg.passes.graphs.lossy import exact_where_unsaved


def plan_layer(kind: LayerKind, saved: tuple[str, ...], name: str) -> TrainingGraph:
    """Return a layer's forward that saves values, and its backward that recomputes the others.

    `saved` are values that own their storage: their views are recomputed.
    """
    gradients = exact_where_unsaved(kind.gradients, saved)
    graph = gradients.graph
    if not gradients.backward.outputs:
        return TrainingGraph(kind.block, graph.replace(name=f"{name}_forward"), None, (), ())
    packs = _packs(graph, saved)
    backward = _recomputing(gradients, {*saved, *kind.shared}, f"{name}_backward", packs)
    available = {value.name for value in backward.inputs}
    inputs = tuple(v.name for v in graph.inputs if v.name in available)
    names = (packs[n].name if n in packs else n for n in saved)
    made_values = tuple(n for n in names if n in available and n not in inputs)
    # A rank's saved part is a copy, so that the whole tensor can be freed.
    parts = {OwnPart.name, TakenPart.name}
    nodes: list[Node] = []
    for node in graph.nodes:
        is_part = node.name in made_values and node.op in parts
        nodes.append(node.changed(attributes={"kept": True}) if is_part else node)
        nodes += [packs[node.name]] if node.name in packs else []
    forward = graph.replace(
        name=f"{name}_forward", nodes=tuple(nodes), outputs=(*graph.outputs, *made_values)
    )
    saves = (*inputs, *made_values)
    trained = kind.gradients.trained
    return TrainingGraph(kind.block, forward.without_dead_code(), backward, saves, trained)


def _packs(graph: Graph, saved: Sequence[str]) -> dict[str, Node]:
    """Return the nodes that pack saved rows of a rank's experts, by the rows' names.

    Rows of ranks of LoRA stay as they are, as they have few columns.
    """
    builder, rows = Builder.extending(graph), dict[str, Node]()
    for node in graph.nodes:
        parts, is_linear = node.get("parts"), node.op == "expert_linear"
        adds_to_rows = node.op == "expert_expand_add" and node.inputs[0] in rows
        if parts is None or not (is_linear or adds_to_rows):
            continue
        inputs = node.name, node.inputs[1 if is_linear else 2]
        weight = graph.types[node.inputs[2]]
        experts = weight.features[0] if is_linear else node.attribute("experts")
        name = f"{node.name}_rows"
        builder.add("pack_rows", inputs, name=name, scope=node.scope, experts=experts, parts=parts)
        rows[node.name] = builder.nodes[-1]
    return {name: node for name, node in rows.items() if name in saved}


def _recomputing(
    gradients: Differentiated,
    kept: set[str],
    name: str,
    packs: Mapping[str, Node] = MappingProxyType({}),
) -> Graph:
    """Insert the nodes of backward's missing inputs, each directly before its first reader.

    This minimizes the lifetime of recomputed values. `packs` pack values that are kept.
    """
    graph, plain = gradients.graph, uncompressed(gradients, kept)
    types = graph.types
    builder = Builder(name)
    forward_values = {value.name for value in plain.inputs} & types.keys()
    for value in plain.inputs:
        if value.name not in forward_values:
            builder.input(value.name, value.type)
    parameters = {**graph.parameters_by_name, **plain.parameters_by_name}

    def provide(wanted: str) -> None:
        if wanted in builder.types:
            return
        if wanted in parameters:
            builder.parameter(parameters[wanted])
        elif wanted in packs:
            pack = packs[wanted]
            indices, values = pack.inputs[1], (Value(wanted, types[wanted]),)
            provide(indices)
            inputs = builder.input(pack.name, pack.output.type), indices
            builder.append(replace(pack, op="unpack_rows", inputs=inputs, outputs=values))
        elif wanted in kept or wanted not in graph.producers:
            builder.input(wanted, types[wanted])
        else:
            node = graph.producers[wanted]
            for read in node.inputs:
                provide(read)
            builder.append(node)

    for node in plain.nodes:
        for wanted in node.inputs:
            provide(wanted)
        builder.append(node)
    return builder.build(plain.outputs)


def prologue_backward(gradients: Differentiated, carried: Sequence[str]) -> Graph:
    """Return the prologue's backward, which recomputes all of its few forward values.

    Its inputs are the prologue's inputs, then the gradients of the first layer's inputs.
    """
    graph = gradients.graph
    backward = _recomputing(gradients, set(), f"{graph.name}_backward")
    incoming = tuple(Value(gradient_name(name), graph.types[name]) for name in carried)
    return backward.replace(inputs=(*graph.inputs, *incoming))


def loss_and_gradients(gradients: Differentiated) -> Graph:
    """Return the epilogue's forward and backward as a single graph.

    Its inputs are the hidden states, `targets` [T] and the gradient of each token's loss; its
    outputs the loss [T], the hidden states' gradient, and the trained parameters' gradients.
    """
    forward, (loss,) = gradients.graph, gradients.graph.outputs
    builder = Builder.extending(forward)
    builder.input(gradient_name(loss), forward.types[loss])
    for parameter in gradients.backward.parameters:
        builder.parameter(parameter)
    for node in gradients.backward.nodes:
        builder.append(node)
    return builder.build([loss, *gradients.backward.outputs])
