"""Differentiate a model: its layers, its prologue, and its epilogue with the loss."""

from __future__ import annotations

from pcg.ir.analysis.trainable import trained
from pcg.ir.builder import Builder
from pcg.ir.graph import Graph
from pcg.ir.program.program import ModelGraph
from pcg.ir.types import TOKENS, tensor
from pcg.passes.differentiate import Differentiate, LayerKind
from pcg.passes.pass_base import Pass
from pcg.passes.stages import Attached, Gradients, ModelGradients, WithLoss


class AddLoss(Pass[Attached, WithLoss]):
    """Put the loss of each token behind the logits of the model to train."""

    name = "add_loss"

    def run(self, before: Attached) -> WithLoss:
        model = before.training
        loss = None if model is None else with_loss(model.epilogue)
        return WithLoss(before.base, before.serving, model, loss)


class DifferentiateModel(Pass[WithLoss, Gradients]):
    """Differentiate the layers, the prologue and the loss of the model to train."""

    name = Differentiate.name

    def run(self, before: WithLoss) -> Gradients:
        model, loss = before.training, before.loss
        if model is None or loss is None:
            return Gradients(before.serving, None)
        prologue = None
        if trained(model.prologue):
            carried = model.prologue.outputs[: len(model.blocks[0].outputs)]
            prologue = Differentiate(wrt=(), outputs=carried).run(model.prologue)
        of_loss = Differentiate(wrt=(loss.inputs[0].name,)).run(loss)
        training = ModelGradients(model, layer_kinds(model), prologue, of_loss)
        return Gradients(before.serving, training)


def layer_kinds(model: ModelGraph) -> tuple[LayerKind, ...]:
    """The layers of a model, differentiated.

    The first layer that trains passes no gradient on, and those below it have no backward.
    """
    groups: dict[tuple[int, bool], list[int]] = {}
    trained_below = bool(trained(model.prologue))
    for layer, index in enumerate(model.layers):
        groups.setdefault((index, trained_below), []).append(layer)
        trained_below |= bool(trained(model.blocks[index]))
    kinds = []
    for (index, passes_on), layers in groups.items():
        block = model.blocks[index]
        inputs, count = tuple(value.name for value in block.inputs), len(block.outputs)
        carried, shared = inputs[:count], inputs[count:]
        gradients = Differentiate(wrt=carried, wanted=carried if passes_on else ()).run(block)
        below = "_first" if trained(block) else "_below"
        name = block.name if passes_on else f"{block.name}{below}"
        kinds.append(LayerKind(name, index, tuple(layers), shared, gradients))
    return tuple(kinds)


def with_loss(epilogue: Graph) -> Graph:
    """The epilogue with the loss of each token: hidden states and `targets` [T] to loss [T]."""
    builder = Builder.extending(epilogue)
    targets = builder.input("targets", tensor("i64", TOKENS))
    op, logits = "cross_entropy", epilogue.outputs[0]
    gathered = epilogue.producers.get(logits)
    if gathered is not None and gathered.op == "all_gather" and not gathered.get("tokens"):
        # Each rank has a part of the vocabulary, and the loss needs no more.
        op, logits = "cross_entropy_part", gathered.inputs[0]
    return builder.build([builder.add(op, [logits, targets], name="loss")])
