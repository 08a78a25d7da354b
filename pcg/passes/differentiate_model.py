"""Differentiate a model: its layers, its prologue, and its epilogue with the loss."""

from __future__ import annotations

from pcg.errors import UnsupportedError
from pcg.ir.analysis.builder import Builder
from pcg.ir.analysis.dataflow import trained
from pcg.ir.graph import Graph
from pcg.ir.program.interfaces import TARGETS
from pcg.ir.program.program import ModelGraph
from pcg.passes.differentiate import Differentiate, layer_kinds
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
        _check_chain(model)
        prologue = None
        if trained(model.prologue):
            carried = model.prologue.outputs[: len(model.blocks[0].outputs)]
            prologue = Differentiate(wrt=(), outputs=carried).run(model.prologue)
        of_loss = Differentiate(wrt=(loss.inputs[0].name,)).run(loss)
        training = ModelGradients(model, layer_kinds(model), prologue, of_loss)
        return Gradients(before.serving, training)


def _check_chain(model: ModelGraph) -> None:
    """Refuse layers that read again what the first is given, whose gradients are a chain's."""
    first = set(model.prologue.outputs[: len(model.blocks[0].outputs)])
    later = [model.blocks[index] for index in model.layers[1:]]
    for graph in (*later, model.epilogue):
        again = sorted(first.intersection(value.name for value in graph.inputs))
        if again:
            raise UnsupportedError(
                f"{graph.name} reads %{again[0]}, which the first layer is given; pcg finetunes "
                "models each of whose layers reads what the one before gives"
            )


def with_loss(epilogue: Graph) -> Graph:
    """The epilogue with the loss of each token: hidden states and `targets` [T] to loss [T]."""
    builder = Builder.extending(epilogue)
    targets = builder.input(TARGETS.name, TARGETS.type)
    op, logits = "cross_entropy", epilogue.outputs[0]
    gathered = epilogue.producers.get(logits)
    if gathered is not None and gathered.op == "all_gather" and not gathered.get("tokens"):
        # Each rank has a part of the vocabulary, and the loss needs no more.
        op, logits = "cross_entropy_part", gathered.inputs[0]
    return builder.build([builder.add(op, [logits, targets], name="loss")])
