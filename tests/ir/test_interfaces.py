"""Every change of one side of an interface between two graphs is refused, and both are named.

The graphs are those of compiled models of several families, over ranks and for both backends. A
change leaves each graph right by itself, so that the rules of single graphs do not find it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal

import pytest

from pcg.compiler import compile_program
from pcg.errors import BrokenGraphError, ProgramError, TypeCheckError, VerifyError
from pcg.ir.analysis.verifier import verify
from pcg.ir.graph import Graph, Node, Value
from pcg.ir.module_paths import WHOLE_MODEL
from pcg.ir.operators import OPERATORS
from pcg.ir.operators.base import TEXT, optional
from pcg.ir.printer import print_graphs
from pcg.ir.program.folder import SERVING_IR, files_of, program_from
from pcg.ir.program.interfaces import check_model
from pcg.ir.program.manifest import Manifest
from pcg.ir.program.program import ModelGraph, Program, TrainingGraph
from pcg.options import PlanOptions
from pcg.passes.attach import Bypasses
from pcg.passes.fusion.fuse_products import FuseLinears
from pcg.passes.pipeline import Settings, pipeline
from pcg.passes.registry import run_text
from pcg.passes.stages import Attached, Base, Emitted, Gradients, Trained
from pcg.peft.lora import LoraBypass
from pcg.peft.prompt import PromptBypass
from tests.support.families import BY_NAME, FAMILIES
from tests.support.models import raised

State = Attached | Gradients | Trained | Emitted
CASES = [
    ("gpt2", 1, "triton"),
    ("gemma2", 2, "torch"),
    pytest.param("llama3", 1, "torch", marks=pytest.mark.slow),
    pytest.param("mixtral", 1, "torch", marks=pytest.mark.slow),
    pytest.param("bloom", 2, "triton", marks=pytest.mark.slow),
]
OTHERS = [
    pytest.param(family.name, 2, "triton", marks=pytest.mark.slow)
    for family in FAMILIES
    if family.name not in ("gpt2", "gemma2", "llama3", "mixtral", "bloom")
]


def networks(base: ModelGraph) -> Bypasses:
    """LoRA at every linear module of the layers, and a prompt, which trains the prologue."""
    sites = (site for site in base.linear_sites() if "{layer}" in site)
    return Bypasses({**dict.fromkeys(sites, (LoraBypass(4),)), WHOLE_MODEL: (PromptBypass(3),)})


@cache
def states(family: str, tp: int, backend: str) -> tuple[State, ...]:
    """A family's model with adapters, differentiated, planned, fused and emitted."""
    lossy: Literal["fp8"] | None = "fp8" if tp > 1 else None
    options = PlanOptions(tp=tp, memory_budget=0.5, lossy_activations=lossy)
    windows = backend == "triton"
    passes = pipeline(Settings(options, bypasses=networks, backend=backend, windows=windows))
    attached = passes.attach.run(Base(raised(family)))
    gradients = passes.prune.run(passes.differentiate.run(passes.parallelize.run(attached)))
    trained = passes.rematerialize.run(passes.compress.run(gradients))
    return attached, gradients, trained, passes.emit.run(passes.fuse.run(trained))


def replaced(state: Any, old: object, new: object) -> Any:
    """A state of a compilation with another graph, or plan of a layer, in an old one's place."""
    if state is old:
        return new
    if isinstance(state, tuple):
        return tuple(replaced(one, old, new) for one in state)
    if isinstance(state, Graph) or not dataclasses.is_dataclass(state):
        return state
    found = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
    changes = {name: replaced(value, old, new) for name, value in found.items()}
    changed = {name: value for name, value in changes.items() if value is not found[name]}
    return dataclasses.replace(state, **changed) if changed else state


# ------------------------------------------------------------- changes of a value of an interface


def other(value: Value) -> Value:
    """The value in another dtype."""
    return Value(value.name, value.type.with_dtype("f64" if value.type.dtype == "f32" else "f32"))


def taking_another(graph: Graph, value: Value) -> Graph:
    """The graph with an input of another dtype, which it casts to the one that it reads."""
    inside = f"{value.name}.inside"
    renamed = graph.renamed({value.name: inside})
    cast = Node("cast", (value.name,), (Value(inside, value.type),), (("dtype", value.type.dtype),))
    inputs = tuple(other(one) if one == value else one for one in graph.inputs)
    return renamed.replace(inputs=inputs, nodes=(cast, *renamed.nodes))


def returning_another(graph: Graph, name: str) -> Graph:
    """The graph with a made output of another dtype, under its name."""
    inside = f"{name}.inside"
    renamed = graph.renamed({name: inside})
    value = other(Value(name, graph.types[name]))
    cast = Node("cast", (inside,), (value,), (("dtype", value.type.dtype),))
    return renamed.replace(nodes=(*renamed.nodes, cast), outputs=graph.outputs)


def changes(graph: Graph) -> Iterator[tuple[str, Graph]]:
    """Every change of one value that a graph takes or returns, by a description."""
    for value in graph.inputs:
        yield f"takes another {value}", taking_another(graph, value)
    for place, name in enumerate(graph.outputs):
        if name in graph.producers:
            yield f"returns another %{name}", returning_another(graph, name)
        rest = (*graph.outputs[:place], *graph.outputs[place + 1 :])
        yield f"does not return %{name}", graph.replace(outputs=rest)
        yield f"returns %{name} twice", graph.replace(outputs=(*graph.outputs, name))
    yield (
        "takes one value more",
        graph.replace(inputs=(*graph.inputs, Value("more", graph.inputs[0].type))),
    )


def refused(state: State) -> str:
    """The message of the error that checking a state raises; empty if it raises none."""
    try:
        state.check()
    except TypeCheckError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("family", "tp", "backend"), [*CASES, *OTHERS])
def test_a_change_of_one_side_of_an_interface_is_refused(
    family: str, tp: int, backend: str
) -> None:
    accepted = []
    for state in states(family, tp, backend):
        assert not refused(state)
        for where, graph in state.graphs.items():
            for what, changed in changes(graph):
                verify(changed)
                message = refused(replaced(state, graph, changed))
                others = message.count("@") + message.count("a model's")
                if others < 2 or f"@{graph.name}" not in message:
                    accepted.append(f"{type(state).__name__} {where} {what}: {message}")
    assert not accepted, "\n".join(accepted)


@pytest.mark.parametrize(("family", "tp", "backend"), [*CASES, *OTHERS])
def test_a_change_of_what_a_layer_saves_and_trains_is_refused(
    family: str, tp: int, backend: str
) -> None:
    accepted = []
    for state in states(family, tp, backend)[2:]:
        trained = state if isinstance(state, Trained) else state.functions.trained  # type: ignore[union-attr]
        assert trained.training is not None
        plan = trained.training.plan
        found: list[tuple[str, object, object]] = [
            (f"{layer.forward.name} without {field} %{name}", layer, _without(layer, field, name))
            for layer in plan.plans
            for field in ("saved", "trained")
            for name in getattr(layer, field)
        ]
        accepted += [what for what, old, new in found if not refused(replaced(state, old, new))]
    assert not accepted, "\n".join(accepted)


def _without(layer: TrainingGraph, field: str, name: str) -> TrainingGraph:
    rest: Any = tuple(other for other in getattr(layer, field) if other != name)
    return dataclasses.replace(layer, **{field: rest})


# -------------------------------------------------------------------------------------- attributes

NO_NUMBER = {
    *(("own_part", "kept"), ("taken_part", "kept"), ("all_gather", "logits")),
    *((op, "padding") for op in ("embedding", "embedding_part", "embedding_shrink")),
}
"""Attributes without which an operator gives the same numbers."""
ANOTHER_FUNCTION = {
    *((op, "reversed") for op in ("add", "div", "mul", "sub")),
    *((op, bound) for op in ("clamp", "clamp_backward") for bound in ("max", "min")),
}
"""Attributes without which a graph may be right and of another function, as of another scalar."""
WORDS = ("no such word", "")
NAMES = (TEXT, optional(TEXT))
"""The kinds of attributes that are any string."""
WRONG: dict[type, tuple[Any, ...]] = {
    bool: (1, "True"),
    int: (0.5, True, "1", (1,), -(2**70)),
    float: ("1.0", True, float("nan"), (1,)),
    str: (1, True, (1,)),
    tuple: (1, True, "(1,)", (1.0,)),
}


@pytest.mark.parametrize(("family", "tp", "backend"), [*CASES, *OTHERS])
def test_a_change_of_an_attributes_name_or_type_is_refused(
    family: str, tp: int, backend: str
) -> None:
    nodes = {
        (node.op, node.attributes): (node, graph)
        for state in states(family, tp, backend)
        for graph in state.graphs.values()
        for node in graph.nodes
    }
    for node, graph in nodes.values():
        verify(alone(node, graph))
        for name, value in node.attributes:
            rest = {key: other for key, other in node.attributes if key != name}
            wrong = WRONG[type(value)] + WORDS * (OPERATORS[node.op].attributes[name] not in NAMES)
            changes = [{**rest, f"{name}_": value}, *({**rest, name: one} for one in wrong)]
            if (node.op, name) not in NO_NUMBER | ANOTHER_FUNCTION:
                changes.append(rest)
            for attributes in changes:
                changed = dataclasses.replace(node, attributes=tuple(sorted(attributes.items())))
                with pytest.raises(VerifyError, match="graph @g: "):
                    verify(alone(changed, graph))


def alone(node: Node, graph: Graph) -> Graph:
    """A graph of one node, with all that it reads as inputs."""
    inputs = tuple(Value(name, graph.types[name]) for name in dict.fromkeys(node.inputs))
    return Graph("g", inputs, (), (node,), (node.name,))


# ------------------------------------------------------------------------- passes, text and folders

MANIFEST = Manifest(1, {}, "llama", "f32", "model.", None, {}, {}, [], {})


@cache
def program() -> Program:
    return compile_program(BY_NAME["llama3"].config(2), "lora")


def narrowed(block: Graph) -> Graph:
    """A layer that returns half of what it did, as a graph of its own right."""
    (name,) = block.outputs
    width = int(block.types[name].shape[-1]) // 2
    half = Value(f"{name}.half", block.types[name].with_features(width))
    bounds = (("dim", -1), ("start", 0), ("stop", width))
    cut = Node("slice", (name,), (half,), bounds)
    return block.replace(nodes=(*block.nodes, cut), outputs=(half.name,))


def test_a_pass_that_makes_graphs_that_do_not_fit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    run = FuseLinears.run

    def changed(self: FuseLinears, graph: Graph) -> Graph:
        made = run(self, graph)
        return narrowed(made) if graph.name == "block_0" else made

    monkeypatch.setattr(FuseLinears, "run", changed)
    both = r"@block_0 gives %\S+.half: f32\[T, 32\], but @block_0 takes %x: f32\[T, 64\]"
    message = rf"pass 'fuse_linears' made graphs that do not fit: {both}"
    with pytest.raises(BrokenGraphError, match=message) as caught:
        compile_program(BY_NAME["llama3"].config(2), "lora")
    assert "graph @serving.block_0(" in caught.value.graph


def test_text_of_a_model_is_verified_as_a_whole() -> None:
    model = program().base
    assert run_text(print_graphs(model.graphs), None)
    text = print_graphs([model.prologue, narrowed(model.blocks[0]), model.epilogue])
    with pytest.raises(TypeCheckError, match=r"@block_0 gives .*, but @epilogue takes %x"):
        run_text(text, None)
    fewer = model.prologue.replace(outputs=model.prologue.outputs[:-1])
    with pytest.raises(TypeCheckError, match=r"@block_0 takes %sin.*, which @prologue does not"):
        run_text(print_graphs([fewer, *model.blocks, model.epilogue]), None)
    empty = model.epilogue.replace(outputs=())
    with pytest.raises(TypeCheckError, match=r"@epilogue returns nothing for the caller"):
        run_text(print_graphs([model.prologue, *model.blocks, empty]), None)


def test_a_folder_whose_graphs_do_not_fit_is_not_loaded() -> None:
    files = files_of(program())
    assert program_from(files, MANIFEST).serving == program().serving
    model = program().serving.model
    graphs = [model.prologue, narrowed(model.blocks[0]), model.epilogue]
    wrong = {**files, SERVING_IR: print_graphs(graphs).encode()}
    with pytest.raises(ProgramError, match=r"do not fit: @block_0 gives .* @block_0 takes %x"):
        program_from(wrong, MANIFEST)
    norms = files[SERVING_IR].replace(b"offset=0.0, ", b"")
    with pytest.raises(ProgramError, match=r"serving.pcg .* rms_norm needs the attribute offset"):
        program_from({**files, SERVING_IR: norms}, MANIFEST)


def test_a_layer_has_one_attention() -> None:
    """As it has one entry of the KV cache."""
    model = program().base
    (block,) = model.blocks
    (first,) = (node for node in block.nodes if node.op == "attention")
    outputs = tuple(Value(f"{value.name}.again", value.type) for value in first.outputs)
    again = dataclasses.replace(first, outputs=outputs, scope="self_attn.second")
    twice = block.replace(nodes=(*block.nodes, again))
    with pytest.raises(TypeCheckError, match=r"attention in self_attn, self_attn\.second; the KV"):
        check_model(dataclasses.replace(model, blocks=(twice,)))
