"""Folding: as text, whole against few layers, and models whose layers differ."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import pcg.compiler as compiler
from pcg.errors import TraceError, UnsupportedError
from pcg.ir.graph import Graph
from pcg.ir.parser import parse_graph, parse_graphs
from pcg.ir.printer import print_graphs
from pcg.ir.program.program import ModelGraph
from pcg.passes.graphs.fold import Fold
from pcg.passes.graphs.raise_operators import raise_graph
from pcg.passes.registry import run_text
from pcg.runtime.model.batch import whole_sequences
from tests.support import oracle
from tests.support.evaluate import evaluate, random_values
from tests.support.families import BY_NAME, FAMILIES, WINDOW
from tests.support.models import folded, raised, traced
from tests.support.parameters import mostly_slow

MODEL = """
graph @model(%input_ids: i64[T], %position_ids: i64[T]) {
  frozen %embed: f32[9, 4] = "embed"
  constant %table: f32[8, 4] = "table"
  frozen %layers.0.up.weight: f32[4, 4] = "layers.0.up.weight"
  frozen %layers.1.up.weight: f32[4, 4] = "layers.1.up.weight"
  %embedding: f32[T, 4] = embedding(%embed, %input_ids)  @embed
  %embedding_1: f32[T, 4] = embedding(%table, %position_ids)  @layers.0
  %cos: f32[T, 4] = cos(%embedding_1)  @layers.0
  %linear: f32[T, 4] = linear(%embedding, %layers.0.up.weight)  @layers.0.up
  %mul: f32[T, 4] = mul(%linear, %cos)  @layers.0
  %linear_1: f32[T, 4] = linear(%mul, %layers.1.up.weight)  @layers.1.up
  %mul_1: f32[T, 4] = mul(%linear_1, %cos)  @layers.1
  %linear_2: f32[T, 9] = linear(%mul_1, %embed)  @head
  return %linear_2
}
"""

FOLDED = """
graph @prologue(%input_ids: i64[T], %position_ids: i64[T]) {
  frozen %embed: f32[9, 4] = "embed"
  constant %table: f32[8, 4] = "table"
  %embed_1: f32[T, 4] = embedding(%embed, %input_ids)  @embed
  %embedding: f32[T, 4] = embedding(%table, %position_ids)  @layers.0
  %cos: f32[T, 4] = cos(%embedding)  @layers.0
  return %embed_1, %cos
}

graph @block_0(%x: f32[T, 4], %cos: f32[T, 4]) {
  frozen %up.weight: f32[4, 4] = "layers.{layer}.up.weight"
  %up: f32[T, 4] = linear(%x, %up.weight)  @up
  %mul: f32[T, 4] = mul(%up, %cos)
  return %mul
}

graph @epilogue(%x: f32[T, 4]) {
  frozen %embed: f32[9, 4] = "embed"
  %head: f32[T, 9] = linear(%x, %embed)  @head
  return %head
}
"""


def test_text() -> None:
    assert run_text(MODEL, "fold") == print_graphs(parse_graphs(FOLDED))
    model = Fold("layers", (0,) * 5).run(parse_graph(MODEL))
    assert print_graphs(model.graphs) == print_graphs(parse_graphs(FOLDED))
    assert model.layers == (0, 0, 0, 0, 0)


def test_layers_with_other_attributes_are_other_blocks() -> None:
    text = MODEL.replace("mul(%linear_1, %cos)", "relu(%linear_1)")
    model = Fold("layers", (1, 0, 1)).run(parse_graph(text))
    assert [[node.op for node in block.nodes] for block in model.blocks] == [
        ["linear", "mul"],
        ["linear", "relu"],
    ]
    assert model.layers == (1, 0, 1)


def test_what_a_later_layer_reads_is_carried() -> None:
    """It is not the hidden state by its place: layers before it hand on a value that none reads."""
    head = "%linear_2: f32[T, 9] = linear("
    added = "%sum: f32[T, 4] = add(%mul_1, %linear)  @head\n  "
    text = MODEL.replace(f"{head}%mul_1,", f"{added}{head}%sum,")
    model = Fold("layers", (0, 1)).run(parse_graph(text))
    assert [len(block.outputs) for block in model.blocks] == [2, 2]
    carried = [value.name for value in model.blocks[1].inputs[:2]]
    assert model.blocks[1].outputs[1] == carried[1]


ATTENTION = "{scale=0.5, softcap=0.0, window=0}"
HEADS = f"""
  %heads: f32[T, 1, 4] = reshape(%mul) {{shape=(-1, 1, 4)}}  @layers.0
  %one: f32[T, 1, 4], %one_lse: f32[T, 1] = attention(%heads, %heads, %heads) {ATTENTION}  @layers.0.one
  %two: f32[T, 1, 4], %two_lse: f32[T, 1] = attention(%one, %heads, %heads) {ATTENTION}  @SCOPE
  %flat: f32[T, 4] = reshape(%two) {{shape=(-1, 4)}}  @SCOPE
  %linear_1: f32[T, 4] = linear(%flat, %layers.1.up.weight)  @layers.1.up
"""  # noqa: E501


@pytest.mark.parametrize(
    ("scope", "message"),
    [
        ("layers.0.two", r"layer: layers.0 computes 2 \(layers.0.one, layers.0.two\), which would"),
        ("head", "attention outside the layers of layers: head; pcg's KV cache has one entry for"),
    ],
)
def test_a_layer_has_one_attention(scope: str, message: str) -> None:
    line = "  %linear_1: f32[T, 4] = linear(%mul, %layers.1.up.weight)  @layers.1.up\n"
    text = MODEL.replace(line, HEADS.replace("SCOPE", scope))
    if scope == "head":
        text = re.sub(r"@layers\.1\S*", "@head", text)
    with pytest.raises(UnsupportedError, match=message):
        run_text(text, "fold")


def test_a_graph_without_layers_is_refused() -> None:
    with pytest.raises(TraceError, match=r"no node of the graph comes from a layer of decoder\.h"):
        run_text(MODEL, "fold{layers_path=decoder.h}")


# ------------------------------------------------------------------------------ whole against few


DIFFERING = ("gemma2", "gemma3", "gpt2-scaled_by_layer", "qwen2.5-windows")
"""Models whose layers differ."""
ALWAYS = (*DIFFERING, "bloom", "falcon-40b", "gptj", "llama3", "opt")
CASES = mostly_slow(map(str, FAMILIES), "opt", "qwen2.5-windows")


@pytest.mark.parametrize("name", CASES)
def test_a_trace_of_every_layer_folds_to_the_same_graphs(name: str) -> None:
    whole, few = raised(name, whole=True), raised(name)
    assert whole.graphs == few.graphs
    assert whole.layers == few.layers


def run_folded(model: ModelGraph, values: dict[str, torch.Tensor], batch: Any) -> torch.Tensor:
    """The logits, layer by layer; parameters are found by their name in the checkpoint."""
    shared: dict[str, torch.Tensor] = {}

    def run(graph: Graph, inputs: list[torch.Tensor], layer: int) -> tuple[torch.Tensor, ...]:
        known = {
            value.name: shared.get(value.name, tensor)
            for value, tensor in zip(graph.inputs, [*inputs, *shared.values()], strict=False)
        }
        for parameter in graph.parameters:
            known[parameter.name] = values[parameter.source.format(layer=layer)]
        return evaluate(graph, known, batch)

    out = run(model.prologue, [batch.input_ids, batch.positions], 0)
    carried = len(model.blocks[0].outputs)
    names = model.prologue.outputs[carried:]
    x = list(out[:carried])
    shared.update(zip(names, out[carried:], strict=True))
    for layer, block in enumerate(model.layers):
        x = list(run(model.blocks[block], x, layer))
    return run(model.epilogue, x, 0)[0]


@pytest.mark.parametrize("name", mostly_slow(ALWAYS, "gemma2", "falcon-40b", "opt"))
def test_the_unfolded_graph_computes_the_same(name: str) -> None:
    trace = traced(name, whole=True)
    values = random_values(trace.graph, tokens=9)
    by_source = {p.source: values[p.name] for p in trace.graph.parameters if not p.transposed}
    by_source |= {p.source: values[p.name] for p in trace.graph.parameters if p.transposed}
    by_source |= trace.constants
    batch = whole_sequences([[3, 1, 4, 1, 5, 9], [2, 6, 5]], torch.device("cpu"))
    values |= {"input_ids": batch.input_ids, "position_ids": batch.positions, **trace.constants}
    (expected,) = evaluate(trace.graph, values, batch)
    (found,) = evaluate(raise_graph(trace.graph), values, batch)
    assert oracle.relative_error(found, expected) < 1e-5
    for model in (folded(name), raised(name)):
        assert oracle.relative_error(run_folded(model, by_source, batch), expected) < 1e-5


# ----------------------------------------------------------------------------------- many layers

MANY = 12
KINDS = [("sliding" if i % 5 in (1, 2) else "full") + "_attention" for i in range(MANY)]

SCHEDULES = {
    "llama3": (2, (0,) * MANY, {}),
    "mistral-window": (2, (0,) * MANY, {}),
    "gemma2": (3, (0, 1) * (MANY // 2), {}),
    "gemma3": (3, (0, 0, 0, 0, 0, 1) * 2, {"layer_types": None, "sliding_window_pattern": 6}),
    "qwen2.5-windows": (3, (0,) * 8 + (1,) * 4, {"max_window_layers": 8}),
    "qwen2.5-layer_types": (3, (0, 1, 1, 0, 0, 0, 1, 1, 0, 0, 0, 1), {"layer_types": KINDS}),
    "gpt2-scaled_by_layer": (MANY, tuple(range(MANY)), {}),
}
"""Traced layers, the schedule, and what is changed of the configuration."""


@pytest.mark.parametrize("name", mostly_slow(SCHEDULES, "llama3"))
def test_many_layers_are_traced_as_few(name: str) -> None:
    count, schedule, changes = SCHEDULES[name]
    config = BY_NAME[name].config(MANY, **changes)
    config = {key: value for key, value in config.items() if value is not None}
    model = oracle.random_model(config)
    executor = compiler.compile(model)
    base = executor.program.base
    assert base.layers == schedule
    assert len(base.blocks) == len(set(schedule))
    sequences = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 35, 8], [97, 9]]
    assert max(map(len, sequences)) > WINDOW
    for logits, sequence in zip(executor.logits(sequences), sequences, strict=True):
        assert oracle.relative_error(logits, oracle.logits(model, sequence)) < 2e-5
    graph = compiler.trace(config).graph
    layers = {int(part) for node in graph.nodes for part in node.scope.split(".") if part.isdigit()}
    assert layers == set(range(count))
