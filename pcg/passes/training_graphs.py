"""Build the training graphs of a model: its layers' forwards and backwards, and the loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass

from pcg.ir.analysis.trainable import trained
from pcg.ir.builder import Builder
from pcg.ir.graph import Graph, Value
from pcg.ir.operators.collectives import OwnPart, TakenPart
from pcg.ir.program.program import ModelGraph, TrainingGraph
from pcg.ir.types import TOKENS, tensor
from pcg.passes.compress import uncompressed
from pcg.passes.differentiate import Differentiated, differentiate, gradient_name
from pcg.passes.prune import prune
from pcg.passes.sharding.coalesce_collectives import coalesce_collectives
from pcg.passes.sharding.overlap import overlap


@dataclass(frozen=True)
class LayerKind:
    """Layers that are differentiated alike: those of one block, the first to train one apart.

    Attributes:
        name: for graphs.
        block: index of their block in the model.
        layers: which they are.
        shared: inputs that come from the prologue, which all layers read.
        wrt: inputs whose gradients the layer below wants.
        gradients: their graph and its backward.
    """

    name: str
    block: int
    layers: tuple[int, ...]
    shared: tuple[str, ...]
    wrt: tuple[str, ...]
    gradients: Differentiated


def layer_kinds(model: ModelGraph) -> tuple[LayerKind, ...]:
    """The layers of a model, differentiated. Below what is trained no gradient will be wanted."""
    groups: dict[tuple[int, bool], list[int]] = {}
    trained_below = bool(trained(model.prologue))
    for layer, index in enumerate(model.layers):
        groups.setdefault((index, trained_below), []).append(layer)
        trained_below |= bool(trained(model.blocks[index]))
    kinds = []
    for (index, passes_on), layers in groups.items():
        block = model.blocks[index]
        count = len(block.outputs)
        carried = [value.name for value in block.inputs[:count]]
        shared = tuple(value.name for value in block.inputs[count:])
        name = block.name if passes_on else f"{block.name}_first"
        wanted = tuple(carried) if passes_on else ()
        gradients = differentiate(block, carried)
        kinds.append(LayerKind(name, index, tuple(layers), shared, wanted, gradients))
    return tuple(kinds)


def plan_layer(kind: LayerKind, saved: tuple[str, ...], name: str) -> TrainingGraph:
    """A layer's forward that keeps these values, and its backward that makes the others again.

    Args:
        kind: of the layer.
        saved: values that storages were made for; their views are made again.
        name: for the two graphs.
    """
    graph = kind.gradients.graph
    if not kind.gradients.backward.outputs:
        return TrainingGraph(kind.block, graph.replace(name=f"{name}_forward"), None, (), ())
    backward = _with_remade(kind.gradients, {*saved, *kind.shared}, f"{name}_backward")
    given = {value.name for value in backward.inputs}
    inputs = tuple(v.name for v in graph.inputs if v.name in given)
    made = tuple(n for n in saved if n in given and n not in inputs)
    forward = _with_copies(graph, {*made})
    forward = forward.replace(name=f"{name}_forward", outputs=(*graph.outputs, *made))
    return TrainingGraph(
        kind.block,
        overlap(coalesce_collectives(forward.without_dead_code()), {*made, *kind.shared}),
        overlap(coalesce_collectives(backward), kind.shared),
        (*inputs, *made),
        kind.gradients.trained,
    )


def _with_copies(graph: Graph, kept: Collection[str]) -> Graph:
    """The graph that copies a rank's parts which are kept, so that the whole tensors can go."""
    pairs = (("kept", True),)
    nodes = tuple(
        dataclasses.replace(node, attributes=tuple(sorted((*node.attributes, *pairs))))
        if node.op in (OwnPart.name, TakenPart.name) and node.name in kept
        else node
        for node in graph.nodes
    )
    return graph.replace(nodes=nodes)


def _with_remade(gradients: Differentiated, kept: set[str], name: str) -> Graph:
    """Backward with the nodes that make what it is not given, each right before its first reader.

    So late, what is made again is alive for as short as it can be.
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


def train_prologue(model: ModelGraph) -> tuple[Graph | None, tuple[str, ...]]:
    """The prologue's backward, and the parameters that it trains; None where it trains none.

    It takes the prologue's inputs, then the gradient of each value that the first layer is handed,
    and makes what it reads of the forward again: that is little, and nothing need be kept.
    """
    prologue = model.prologue
    if not trained(prologue):
        return None, ()
    carried = prologue.outputs[: len(model.blocks[0].outputs)]
    gradients = prune(differentiate(prologue, (), carried), ())
    backward = _with_remade(gradients, set(), "prologue_backward")
    incoming = tuple(Value(gradient_name(name), prologue.types[name]) for name in carried)
    return backward.replace(inputs=(*prologue.inputs, *incoming)), gradients.trained


def train_epilogue(model: ModelGraph) -> tuple[Graph, Graph, tuple[str, ...]]:
    """The epilogue with its loss, forward and backward in one graph, and the loss alone.

    Both take the hidden states and `targets` [T]; the first also the gradient of each token's loss,
    and gives the loss [T], the hidden states' gradient, and the trained parameters'.
    """
    builder = Builder.extending(model.epilogue)
    targets = builder.input("targets", tensor("i64", TOKENS))
    logits = model.epilogue.outputs[0]
    gathered = model.epilogue.producers.get(logits)
    if gathered is not None and gathered.op == "all_gather" and not gathered.get("tokens"):
        # Each rank has a part of the vocabulary, and the loss needs no more.
        loss = builder.add("cross_entropy_part", [gathered.inputs[0], targets], name="loss")
    else:
        loss = builder.add("cross_entropy", [logits, targets], name="loss")
    forward = builder.build([loss])
    carried = model.epilogue.inputs[0].name
    both = prune(differentiate(forward, [carried]), [carried])
    joined = Builder.extending(forward)
    incoming = joined.input(gradient_name(loss), forward.types[loss])
    for parameter in both.backward.parameters:
        joined.parameter(parameter)
    for node in both.backward.nodes:
        joined.append(node)
    assert incoming in joined.types
    return joined.build([loss, *both.backward.outputs]), forward, both.trained
