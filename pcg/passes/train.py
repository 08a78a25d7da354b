"""Build the training graphs of a model: each block's forward and backward, and the loss."""

from __future__ import annotations

import dataclasses

from pcg.errors import UnsupportedError
from pcg.ir.graph import Builder, Graph
from pcg.ir.program import ModelGraph, TrainingGraph
from pcg.ir.types import TOKENS, tensor
from pcg.passes.differentiate import differentiate, gradient_name


def train_block(block: Graph) -> TrainingGraph:
    """Forward and backward of one layer."""
    carried = tuple(value.name for value in block.inputs[: len(block.outputs)])
    whole = differentiate(block, carried)
    kept = (*whole.inputs, *whole.saved)
    first = None
    kept_first: tuple[str, ...] = ()
    trained_first: tuple[str, ...] = ()
    if any(parameter.role == "adapter" for parameter in block.parameters):
        alone = differentiate(block, ())
        # The forward is shared, so the first layer keeps what every layer keeps.
        kept_first, trained_first = kept, alone.trained
        first = alone.backward
        first = dataclasses.replace(first, name=f"{block.name}_backward_first")
    return TrainingGraph(
        whole.forward, whole.backward, first, kept, kept_first, whole.trained, trained_first
    )


def train_epilogue(model: ModelGraph) -> tuple[Graph, Graph, tuple[str, ...]]:
    """The epilogue with its loss, forward and backward in one graph, and the loss alone.

    Both take the hidden states and `targets` [T]; the first also the gradient of each token's loss,
    and gives the loss [T], the hidden states' gradient, and the trained parameters'.

    Raises:
        UnsupportedError: something is to be trained before the first layer; it is named.
    """
    for parameter in model.prologue.parameters:
        if parameter.role == "adapter":
            raise UnsupportedError(
                f"{parameter.source} lies before the first layer, where pcg runs adapters but does "
                "not finetune them; leave it out (exclude_modules, or bias other than 'all')"
            )
    builder = Builder.extending(model.epilogue)
    targets = builder.input("targets", tensor("i64", TOKENS))
    loss = builder.add("cross_entropy", [model.epilogue.outputs[0], targets], name="loss")
    forward = builder.build([loss])
    carried = model.epilogue.inputs[0].name
    both = differentiate(forward, [carried])
    joined = Builder.extending(forward)
    incoming = joined.input(gradient_name(loss), forward.types[loss])
    for parameter in both.backward.parameters:
        joined.parameter(parameter)
    for node in both.backward.nodes:
        joined.append(node)
    assert incoming in joined.types
    return joined.build([loss, *both.backward.outputs]), forward, both.trained
