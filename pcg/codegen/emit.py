"""Emit the functions of a program: what serves, and what finetunes."""

from __future__ import annotations

from collections.abc import Sequence

from pcg.codegen import torch_emitter, triton_emitter
from pcg.codegen.function_emitter import Emitter
from pcg.ir.graph import Graph
from pcg.ir.program.program import ModelGraph, TrainingGraph

_EMITTERS = {
    "torch": Emitter(torch_emitter.emit_function, torch_emitter.emit_module),
    "triton": Emitter(
        triton_emitter.emit_function, triton_emitter.emit_module, triton_emitter.SERVING
    ),
}


def emit_serving(name: str, model: ModelGraph, backend: str) -> str:
    """The source of prologue, blocks and epilogue."""
    emitter = _EMITTERS[backend]
    functions = [
        emitter.emit_function(graph, graph.name, _role(model, graph), asks=graph in model.blocks)
        for graph in model.graphs
    ]
    return emitter.emit_module(
        name, "It generates, for adapters of any rank in one batch.", [*functions, *emitter.serving]
    )


def emit_training(
    name: str,
    model: ModelGraph,
    plans: Sequence[TrainingGraph],
    layers: Sequence[int],
    epilogue: Graph,
    loss: Graph,
    prologue: Graph | None,
    backend: str,
) -> str:
    """The source of each plan's forward and backward, and of the epilogue's both in one.

    Args:
        name: of the model.
        model: with bypass networks.
        plans: the ways in which layers are trained.
        layers: for each layer, the index of its plan.
        epilogue: loss and gradients.
        loss: the loss alone.
        prologue: backward of the prologue; None where it trains nothing.
        backend: that it is for.
    """
    emitter = _EMITTERS[backend]
    functions = [emitter.emit_function(model.prologue, "prologue", _role(model, model.prologue))]
    if prologue is not None:
        incoming = [value.name for value in prologue.inputs[len(model.prologue.inputs) :]]
        functions.append(
            emitter.emit_function(
                prologue,
                prologue.name,
                "Prologue, backward. Gradients of its adapters.",
                outputs=[prologue.outputs],
                given={"gradients": incoming},
                free=True,
            )
        )
    for index, plan in enumerate(plans):
        where = _layers([layer for layer, of in enumerate(layers) if of == index])
        functions += _plan_functions(emitter, model.blocks[plan.block], plan, where)
    functions.append(
        emitter.emit_function(
            epilogue,
            "epilogue_train",
            "Loss of each token, its gradient by the hidden states, and by adapters.",
            outputs=[epilogue.outputs[:1], epilogue.outputs[1:2], epilogue.outputs[2:]],
            free=True,
        )
    )
    functions.append(emitter.emit_function(loss, "epilogue_loss", "Loss of each token.", free=True))
    return emitter.emit_module(name, "It finetunes one adapter at a time.", functions)


def _plan_functions(emitter: Emitter, block: Graph, plan: TrainingGraph, where: str) -> list[str]:
    carried = block.outputs
    forward = emitter.emit_function(
        plan.forward.replace(outputs=(*carried, *plan.kept)),
        plan.forward.name,
        f"{where}, forward. Returns its outputs, and what backward is given.",
        outputs=[carried, plan.kept],
        free=True,
        asks=True,
    )
    if plan.backward is None:
        return [forward]
    outputs = plan.backward.outputs
    incoming = [v.name for v in plan.backward.inputs if v.name not in plan.kept]
    count = len(outputs) - len(plan.trained)
    backward = emitter.emit_function(
        plan.backward,
        plan.backward.name,
        f"{where}, backward. Gradients of its inputs{'' if count else ': none'}, and of its "
        "adapters.",
        outputs=[outputs[:count], outputs[count:]],
        given={"kept": plan.kept, "gradients": incoming},
        free=True,
        asks=True,
    )
    return [forward, backward]


def _role(model: ModelGraph, graph: Graph) -> str:
    if graph is model.prologue:
        return "Token ids and positions to the first layer's input and what all layers share."
    if graph is model.epilogue:
        return "The last layer's output to the logits."
    layers = [i for i, block in enumerate(model.layers) if model.blocks[block] is graph]
    return f"{_layers(layers)}."


def _layers(numbers: Sequence[int]) -> str:
    return f"Layer{'s' * (len(numbers) > 1)} {_ranges(numbers)}"


def _ranges(numbers: Sequence[int]) -> str:
    """`0-3, 5` for 0, 1, 2, 3, 5."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)
