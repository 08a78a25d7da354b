"""The functions of a program, one per graph: serving and training functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pcg.ir.graph import Graph
from pcg.ir.program.interfaces import gradient_name
from pcg.ir.program.program import ModelGraph, TrainingGraph
from pcg.units import number_ranges


@dataclass(frozen=True)
class Function:
    """A graph, and the interface of its emitted function.

    Attributes:
        doc: the first line of its docstring.
        outputs: groups of the graph's outputs, each returned as a tuple; None to return the outputs
            themselves.
        holders: names of lists before the other arguments, each with the inputs that it holds. The
            function empties them, so that no other reference keeps the inputs alive.
        free: True to delete each value after its last use.
        yields_products: True for a generator that requests products by frozen weights from its
            caller, so that concurrent functions share them.
    """

    graph: Graph
    name: str
    doc: str
    outputs: Sequence[Sequence[str]] | None = None
    holders: Mapping[str, Sequence[str]] = field(default_factory=dict)
    free: bool = False
    yields_products: bool = False


def serving_functions(model: ModelGraph) -> tuple[Function, ...]:
    """Return the functions of prologue, blocks, epilogue, and epilogue without its head."""
    functions = [
        Function(graph, graph.name, _role(model, graph), yields_products=graph in model.blocks)
        for graph in model.graphs
    ]
    doc = "The last layer's output to the last hidden state, which the head reads."
    return (*functions, Function(without_head(model.epilogue), "last_hidden", doc))


def without_head(epilogue: Graph) -> Graph:
    """Return the epilogue up to the head's input, without the head's adapters."""
    parameters = epilogue.parameters_by_name

    def is_matrix(name: str) -> bool:
        parameter = parameters.get(name)
        return (
            parameter is not None and parameter.role == "frozen" and len(parameter.type.shape) == 2
        )

    products = (node for node in epilogue.nodes if any(map(is_matrix, node.inputs)))
    *_, head = products
    hidden = head.inputs[0]
    while (node := epilogue.producers.get(hidden)) is not None and node.scope == head.scope:
        if not any(
            name in parameters and parameters[name].role == "adapter" for name in node.inputs
        ):
            break
        hidden = node.inputs[0]
    return epilogue.replace(name="last_hidden", outputs=(hidden,)).without_dead_code()


def training_functions(
    model: ModelGraph,
    plans: Sequence[TrainingGraph],
    layers: Sequence[int],
    epilogue: Graph,
    loss: Graph,
    prologue: Graph | None,
) -> Iterator[Function]:
    """Yield the functions of each plan's forward and backward, and of the combined epilogue.

    Args:
        model: the model with bypass networks.
        plans: the distinct training plans of layers.
        layers: for each layer, the index of its plan.
        epilogue: the graph of loss and gradients.
        loss: the graph of the loss only.
        prologue: the backward graph of the prologue; None if it has no trained parameters.
    """
    yield Function(model.prologue, "prologue", _role(model, model.prologue))
    if prologue is not None:
        incoming = [value.name for value in prologue.inputs[len(model.prologue.inputs) :]]
        yield Function(
            prologue,
            prologue.name,
            "Prologue, backward. Gradients of its adapters.",
            outputs=[prologue.outputs],
            holders={"gradients": incoming},
            free=True,
        )
    for index, plan in enumerate(plans):
        where = _layers([layer for layer, of in enumerate(layers) if of == index])
        yield from _plan_functions(model.blocks[plan.block], plan, where)
    yield Function(
        epilogue,
        "epilogue_train",
        "Loss of each token, its gradient by the hidden states, and by adapters.",
        outputs=[epilogue.outputs[:1], epilogue.outputs[1:2], epilogue.outputs[2:]],
        free=True,
        yields_products=True,
    )
    doc = "Loss of each token."
    yield Function(loss, "epilogue_loss", doc, free=True, yields_products=True)


def _plan_functions(block: Graph, plan: TrainingGraph, where: str) -> Iterator[Function]:
    yield Function(
        plan.forward.replace(outputs=(*block.outputs, *plan.saved)),
        plan.forward.name,
        f"{where}, forward. Returns its outputs, and what backward is given.",
        outputs=[block.outputs, plan.saved],
        free=True,
        yields_products=True,
    )
    if plan.backward is None:
        return
    outputs = plan.backward.outputs
    incoming = [gradient_name(name) for name in block.outputs]
    count = len(outputs) - len(plan.trained)
    yield Function(
        plan.backward,
        plan.backward.name,
        f"{where}, backward. Gradients of its inputs{'' if count else ': none'}, and of its "
        "adapters.",
        outputs=[outputs[:count], outputs[count:]],
        holders={"kept": plan.saved, "gradients": incoming},
        free=True,
        yields_products=True,
    )


def _role(model: ModelGraph, graph: Graph) -> str:
    if graph is model.prologue:
        return "Token ids and positions to the first layer's input and what all layers share."
    if graph is model.epilogue:
        return "The last layer's output to the logits."
    layers = [i for i, block in enumerate(model.layers) if model.blocks[block] is graph]
    return f"{_layers(layers)}."


def _layers(numbers: Sequence[int]) -> str:
    return f"Layer{'s' * (len(numbers) > 1)} {number_ranges(numbers)}"
