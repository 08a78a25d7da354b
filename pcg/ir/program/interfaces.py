"""Type checks of the interfaces between a program's graphs.

    prologue → block × N → epilogue   carried values by place; the prologue's shared values by name
    layer                             at most one attention, as it has one entry of the KV cache
    epilogue → loss                   the epilogue's inputs and `targets` to the loss of each token
    graph → backward                  gradients `d_x` of outputs x, and values of the graph, to the
                                      gradients of inputs and parameters
    forward → backward                likewise, with the values that forward saves

An error names both sides. `pcg.ir.analysis.verifier` checks the rules of a single graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from pcg.errors import TypeCheckError
from pcg.ir.graph import Graph, Value
from pcg.ir.program.program import ModelGraph, Training, TrainingGraph
from pcg.ir.types import TOKENS, tensor

TARGETS = Value("targets", tensor("i64", TOKENS))
"""The input of a loss after the epilogue's inputs."""
_TOKENS, _LOSS = tensor("i64", TOKENS), Value("loss", tensor("f32", TOKENS))


def gradient_name(name: str) -> str:
    """Return the backward graph's name for the gradient of a forward output."""
    return f"d_{name}"


def check_model(model: ModelGraph) -> None:
    """Check the chain of a model's graphs; TypeCheckError names both sides."""
    prologue, epilogue = model.prologue, model.epilogue
    if [value.type for value in prologue.inputs] != [_TOKENS, _TOKENS]:
        raise TypeCheckError(
            f"@{prologue.name} takes {_shown(prologue.inputs)}; a model's takes input_ids and "
            f"position_ids, each {_TOKENS}"
        )
    if len({*prologue.outputs}) < len(prologue.outputs):
        raise TypeCheckError(
            f"@{prologue.name} returns {_names(prologue.outputs)}; a model's returns each once"
        )
    if not model.layers or sorted(set(model.layers)) != list(range(len(model.blocks))):
        raise TypeCheckError(f"layers {model.layers} are not of {len(model.blocks)} blocks")
    count = len(model.blocks[0].outputs)
    for block in model.blocks:
        if len(block.outputs) != count or not count:
            raise TypeCheckError(
                f"@{model.blocks[0].name} hands on {count} values and @{block.name} "
                f"{len(block.outputs)}; all layers hand on as many, at least one"
            )
        _check_attention(block, 1)
    _check_attention(prologue, 0)
    _check_attention(epilogue, 0)
    graphs = (*model.blocks, epilogue, prologue)
    for giver, taker in dict.fromkeys(pairwise([-1, *model.layers, len(model.blocks)])):
        _check_carried(graphs[giver], graphs[taker], count)
    for graph in (*model.blocks, epilogue):
        for value in graph.inputs[count:]:
            if value.name not in prologue.outputs:
                raise TypeCheckError(
                    f"@{graph.name} takes {value}, which @{prologue.name} does not return; it "
                    f"returns {_names(prologue.outputs)}"
                )
            carried_value = Value(value.name, prologue.types[value.name])
            _check_same(prologue, carried_value, graph, value)
    logits = [epilogue.types[name] for name in epilogue.outputs]
    if len(logits) != 1 or len(logits[0].dims) != 2 or not logits[0].is_float:
        raise TypeCheckError(
            f"@{epilogue.name} returns {', '.join(map(str, logits)) or 'nothing'} for the caller; "
            "a model's returns the logits, floats [T, vocabulary]"
        )


def check_logits(models: Iterable[ModelGraph | None]) -> None:
    """Check that forms of a model return logits of the same type; raises TypeCheckError."""
    ends = [model.epilogue for model in models if model is not None]
    for first, other in pairwise(ends):
        _check_returned(other, _outputs(first), f"the logits of @{first.name} of the same model")


def check_signature(graph: Graph, other: Graph) -> None:
    """Check that another form of a graph takes and returns the same types."""
    _check_inputs(other, graph.inputs, f"@{graph.name}, of which it is made,")
    _check_returned(other, _outputs(graph), f"what @{graph.name} returns")


def check_loss(epilogue: Graph, loss: Graph) -> None:
    """Check the graph of the loss against the epilogue; raises TypeCheckError."""
    _check_inputs(loss, (*epilogue.inputs, TARGETS), f"@{epilogue.name} with the loss")
    _check_returned(loss, [_LOSS], f"the loss of @{epilogue.name}")


def check_backward(graph: Graph, backward: Graph, of: Sequence[str]) -> None:
    """Check a graph's backward, with gradients of `of`; raises TypeCheckError."""
    incoming = {gradient_name(name): graph.types[name] for name in graph.outputs}
    for value in backward.inputs:
        type_ = graph.types.get(value.name, incoming.get(value.name))
        if type_ is None:
            raise TypeCheckError(
                f"@{backward.name} takes {value}, which is neither a value of @{graph.name} nor "
                f"the gradient of what it returns, {_names(graph.outputs)}"
            )
        _check_same(graph, Value(value.name, type_), backward, value)
    wanted = _gradients_of(graph, of, backward)
    _check_returned(backward, wanted, f"the gradients of @{graph.name}")


def _check_layer(block: Graph, layer: TrainingGraph) -> None:
    forward, backward, count = layer.forward, layer.backward, len(block.outputs)
    _check_inputs(forward, block.inputs, f"@{block.name}")
    first = forward.outputs[:count]
    _check_returned(forward, _outputs(block), f"what @{block.name} returns, first", first)
    if backward is None:
        if layer.saved or layer.trained:
            raise TypeCheckError(
                f"@{forward.name} saves {_names(layer.saved)} for no backward, and trains "
                f"{_names(layer.trained) or 'nothing'}"
            )
        return
    inputs = {value.name for value in forward.inputs}
    made_values = tuple(name for name in layer.saved if name not in inputs)
    if forward.outputs[count:] != made_values:
        raise TypeCheckError(
            f"@{forward.name} returns {_names(forward.outputs[count:]) or 'nothing'} for "
            f"@{backward.name}, for which {_names(made_values) or 'nothing'} is saved"
        )
    incoming = {gradient_name(name) for name in block.outputs}
    taken = {value.name for value in backward.inputs} - incoming
    if taken != {*layer.saved}:
        raise TypeCheckError(
            f"@{backward.name} takes {_names(sorted(taken)) or 'nothing'} of @{forward.name}, of "
            f"which {_names(sorted(layer.saved)) or 'nothing'} is saved"
        )
    carried = [value.name for value in block.inputs[:count]]
    passes_on = len(backward.outputs) > len(layer.trained)
    sources = forward.replace(outputs=block.outputs, parameters=block.parameters)
    check_backward(sources, backward, [*(carried if passes_on else ()), *layer.trained])


def check_training(training: Training) -> None:
    """Check the training graphs: a model, its layers' plans, and the backward of its ends.

    Raises:
        TypeCheckError: two graphs do not match; names both.
    """
    model, plans, layers = training.model, training.plans, training.layers
    check_model(model)
    if [plans[index].block for index in layers] != [*model.layers]:
        raise TypeCheckError(f"plans {layers} are not of layers {model.layers}")
    for plan in plans:
        _check_layer(model.blocks[plan.block], plan)
    if training.prologue is not None:
        check_backward(model.prologue, training.prologue, training.prologue_trained)
    epilogue, loss = model.epilogue, training.epilogue
    loss_inputs = (*epilogue.inputs, TARGETS, Value(gradient_name(_LOSS.name), _LOSS.type))
    _check_inputs(loss, loss_inputs, f"@{epilogue.name} with the loss and its gradient")
    gradients = (epilogue.inputs[0].name, *training.epilogue_trained)
    wanted = [_LOSS, *_gradients_of(epilogue, gradients, loss)]
    _check_returned(loss, wanted, f"the loss, and the gradients of @{epilogue.name}")
    below: Graph | None = model.prologue if training.prologue is not None else None
    for index in layers:
        backward, trained = plans[index].backward, plans[index].trained
        passes_on = backward is not None and len(backward.outputs) > len(trained)
        if below is not None and not passes_on:
            layer_graph = backward or plans[index].forward
            raise TypeCheckError(
                f"@{layer_graph.name} returns no gradient of what @{below.name} gives"
            )
        below = backward


def _check_attention(graph: Graph, most: int) -> None:
    attentions = [node.scope or node.name for node in graph.nodes if node.op == "attention"]
    if len(attentions) > most:
        raise TypeCheckError(
            f"@{graph.name} has attention in {', '.join(attentions)}; the KV cache has one entry "
            f"for each layer, and none outside the layers, so there can be {most}"
        )


def _check_carried(giver: Graph, taker: Graph, count: int) -> None:
    returned, taken = giver.outputs[:count], taker.inputs[:count]
    if len(returned) < count or len(taken) < count:
        raise TypeCheckError(
            f"@{giver.name} returns {_names(giver.outputs) or 'nothing'}, and @{taker.name} takes "
            f"{_shown(taker.inputs) or 'nothing'}; layers hand on {count} values"
        )
    for name, value in zip(returned, taken, strict=True):
        _check_same(giver, Value(name, giver.types[name]), taker, value)


def _check_same(giver: Graph, returned: Value, taker: Graph, taken: Value) -> None:
    if returned.type != taken.type:
        raise TypeCheckError(f"@{giver.name} gives {returned}, but @{taker.name} takes {taken}")


def _check_inputs(graph: Graph, values: Iterable[Value], what: str) -> None:
    values = tuple(values)
    if [value.type for value in graph.inputs] != [value.type for value in values]:
        raise TypeCheckError(
            f"@{graph.name} takes {_shown(graph.inputs)}, and {what} {_shown(values)}"
        )


def _check_returned(
    graph: Graph, wanted: Sequence[Value], what: str, outputs: Sequence[str] | None = None
) -> None:
    returned = _outputs(graph, outputs)
    if len(returned) != len(wanted):
        raise TypeCheckError(
            f"@{graph.name} returns {len(returned)} values, {_shown(returned)}; as {what}, it "
            f"returns {len(wanted)}, {_shown(wanted)}"
        )
    for output, value in zip(returned, wanted, strict=True):
        if output.type != value.type:
            raise TypeCheckError(f"@{graph.name} returns {output}; as {what}, it returns {value}")


def _outputs(graph: Graph, names: Sequence[str] | None = None) -> list[Value]:
    return [Value(name, graph.types[name]) for name in (graph.outputs if names is None else names)]


def _gradients_of(graph: Graph, names: Sequence[str], backward: Graph) -> list[Value]:
    known = {value.name: value.type for value in graph.inputs}
    known |= {parameter.name: parameter.type for parameter in graph.parameters}
    for name in names:
        if name not in known:
            raise TypeCheckError(
                f"@{backward.name} gives the gradient of %{name}, which is no input or parameter "
                f"of @{graph.name}"
            )
    return [Value(gradient_name(name), known[name]) for name in names]


def _shown(values: Iterable[Value]) -> str:
    return ", ".join(map(str, values))


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"%{name}" for name in names)
