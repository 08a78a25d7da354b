"""Emit the functions of a program: what serves, and what finetunes."""

from __future__ import annotations

from collections.abc import Sequence

from pcg.codegen.torch_emitter import emit_function, emit_module
from pcg.ir.graph import Graph
from pcg.ir.program import ModelGraph, TrainingGraph


def emit_serving(name: str, model: ModelGraph) -> str:
    """The source of prologue, blocks and epilogue."""
    functions = [
        emit_function(graph, graph.name, f"{_role(model, graph)}") for graph in model.graphs
    ]
    return emit_module(name, "It generates, for adapters of any rank in one batch.", functions)


def emit_training(
    name: str, model: ModelGraph, blocks: Sequence[TrainingGraph], epilogue: Graph, loss: Graph
) -> str:
    """The source of each block's forward and backward, and of the epilogue's both in one."""
    functions = [emit_function(model.prologue, "prologue", _role(model, model.prologue))]
    for block, training in zip(model.blocks, blocks, strict=True):
        carried = block.outputs
        functions.append(
            emit_function(
                training.forward.replace(outputs=(*carried, *training.kept)),
                f"{block.name}_forward",
                f"{_role(model, block)} Returns its outputs, and what backward reads.",
                outputs=[carried, training.kept],
                free=True,
            )
        )
        count = len(carried)
        functions.append(
            emit_function(
                training.backward,
                f"{block.name}_backward",
                "Gradients of its inputs and adapters.",
                outputs=[training.backward.outputs[:count], training.backward.outputs[count:]],
                kept=training.kept,
                free=True,
            )
        )
        if training.first is not None:
            functions.append(
                emit_function(
                    training.first,
                    f"{block.name}_backward_first",
                    "Gradients of its adapters alone, where it is the first layer.",
                    outputs=[(), training.first.outputs],
                    kept=training.kept_first,
                    free=True,
                )
            )
    functions.append(
        emit_function(
            epilogue,
            "epilogue_train",
            "Loss of each token, its gradient by the hidden states, and by adapters.",
            outputs=[epilogue.outputs[:1], epilogue.outputs[1:2], epilogue.outputs[2:]],
            free=True,
        )
    )
    functions.append(emit_function(loss, "epilogue_loss", "Loss of each token.", free=True))
    return emit_module(name, "It finetunes one adapter at a time.", functions)


def _role(model: ModelGraph, graph: Graph) -> str:
    if graph is model.prologue:
        return "Token ids and positions to the first layer's input and what all layers share."
    if graph is model.epilogue:
        return "The last layer's output to the logits."
    layers = [i for i, block in enumerate(model.layers) if model.blocks[block] is graph]
    return f"One layer: {_ranges(layers)}."


def _ranges(numbers: Sequence[int]) -> str:
    """`0-3, 5` for 0, 1, 2, 3, 5."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)
