"""Costs of steps are the cost model's own of the same operators, whatever pieces a step has."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcg.errors import CostModelError
from pcg.ir.operators.base import Types
from pcg.ir.types import TOKENS, tensor
from pcg.parallel.costs.catalog import find_cost_model
from pcg.parallel.costs.cost_model import SheetModel
from pcg.parallel.costs.step_costs import GraphSeconds, SequenceChunk, StepShape
from pcg.parallel.costs.work import work_of
from pcg.passes.pipeline import Settings, pipeline
from pcg.simulate.simulated_program import SimulatedProgram, simulated_program
from pcg.source import resolve

MODEL = "meta-llama/Llama-3.2-1B"


@cache
def a100() -> SheetModel:
    model = find_cost_model("A100-80")
    assert isinstance(model, SheetModel)
    return model


@cache
def program(tp: int = 1) -> SimulatedProgram:
    return simulated_program(MODEL, "A100-80", tp=tp, finetuning_tokens=1024)


@cache
def base_layer() -> GraphSeconds:
    source = resolve(MODEL)
    base = pipeline(Settings()).base(source.config).model
    return GraphSeconds(base.blocks[0], a100(), 1)


@pytest.mark.parametrize("tokens", [1, 64, 1000])
def test_a_whole_sequence_costs_what_the_model_says(tokens: int) -> None:
    source = resolve(MODEL)
    block = pipeline(Settings()).base(source.config).model.blocks[0]
    wanted = 0.0
    for node in block.nodes:
        ins: Types = tuple(block.types[name] for name in node.inputs)
        outs: Types = tuple(value.type for value in node.outputs)
        attributes = dict(node.attributes)
        wanted += a100().operator_seconds(node.op, ins, outs, attributes, tokens, tokens)
    found = base_layer().seconds(StepShape.of([SequenceChunk(tokens, 0)]))
    assert found == pytest.approx(wanted, rel=1e-6)


def test_decoding_reads_every_context() -> None:
    """Keys and values of 64 sequences are read, at the bandwidth that programs reach."""
    alone = base_layer().seconds(StepShape.of([SequenceChunk(1, 0)] * 64))
    far = base_layer().seconds(StepShape.of([SequenceChunk(1, 10_000)] * 64))
    kv_bytes = 64 * 10_000 * 2 * 8 * 64 * 2
    bandwidth = a100().sheet.memory_bytes_per_s * a100().achieved.memory
    assert far - alone == pytest.approx(kv_bytes / bandwidth, rel=0.02)


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 3)), min_size=1, max_size=6))
def test_shapes_are_sums_over_pieces(drawn: list[tuple[int, int]]) -> None:
    ranks = {1: 8, 2: 16, 3: 64}
    pieces = [
        SequenceChunk(tokens, 7, True, False, adapter or None, ranks.get(adapter, 0))
        for tokens, adapter in drawn
    ]
    shape = StepShape.of(pieces)
    used = {adapter for _, adapter in drawn if adapter}
    assert shape.tokens == sum(tokens for tokens, _ in drawn)
    assert shape.pairs == sum(sum(range(8, 8 + tokens)) for tokens, _ in drawn)
    assert shape.adapted_ranks == sum(tokens * ranks.get(a, 0) for tokens, a in drawn)
    assert (shape.adapters, shape.ranks) == (len(used), sum(ranks[a] for a in used))


def test_adapters_cost_their_own_products() -> None:
    """One adapter costs the products of its rank; 64 others cost what reading each takes."""
    costs, tokens = program().costs, 64
    base = costs.step_seconds(StepShape.of([SequenceChunk(1, 0)] * tokens))
    one = costs.step_seconds(StepShape.of([SequenceChunk(1, 0, False, False, 0, 16)] * tokens))
    many = costs.step_seconds(
        StepShape.of([SequenceChunk(1, 0, False, False, i, 16) for i in range(64)])
    )
    assert base < one < many
    size = program().adapter("a", 16).size_bytes
    bandwidth = a100().sheet.memory_bytes_per_s * a100().achieved.memory
    assert many - one == pytest.approx(63 * size / bandwidth, rel=0.05)
    x, a = tensor("bf16", TOKENS, 2048), tensor("bf16", 16, 2048)
    shrink = work_of("shrink", (x, a), (tensor("bf16", TOKENS, 16),), {}, tokens, 1)
    assert one - base > 16 * 4 * a100().work_seconds(shrink)


def test_ranks_share_the_work() -> None:
    """Two ranks take at least half the time of one, and less than all of it."""
    shape = StepShape.of([SequenceChunk(4096, 0, True)])
    one, two = (program(tp).costs.step_seconds(shape) for tp in (1, 2))
    assert 0.5 < two / one < 0.8
    assert program(2).page_bytes * 2 == program(1).page_bytes
    window = StepShape.of([SequenceChunk(1024, 0, False, True, "trained", 16)])
    one, two = (program(tp).costs.backward_seconds(5, window) for tp in (1, 2))
    assert 0.5 < two / one < 0.9


def test_backward_is_about_twice_the_forward_of_all_linears() -> None:
    costs = program().costs
    window = StepShape.of([SequenceChunk(1024, 0, False, False, "trained", 16)])
    forward = costs.step_seconds(window)
    backward = sum(costs.backward_seconds(layer, window) for layer in range(costs.layers))
    # No gradients of frozen weights: about one product back for one forward, and adapters' own.
    assert 1.0 < backward / forward < 2.0


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), max_size=5), st.integers(1, 50))
def test_windows_bound_what_is_seen(drawn: list[tuple[int, int]], window: int) -> None:
    """Each token sees itself and those before it; a chunk reads each key that it sees once."""
    pairs = cached = 0
    for tokens, context in drawn:
        seen = [range(max(0, at + 1 - window), at + 1) for at in range(context, context + tokens)]
        pairs += sum(map(len, seen))
        cached += len({key for keys in seen for key in keys})
    shape = StepShape.of(SequenceChunk(tokens, context) for tokens, context in drawn)
    assert shape.seen(window) == (cached, pairs)
    assert shape.seen(0) == (shape.cached, shape.pairs) == shape.seen(1000)


def test_sliding_windows_cost_what_they_see() -> None:
    costs = simulated_program("google/gemma-2-27b", "A100-80", tp=4).costs
    short, far, farther = (
        costs.step_seconds(StepShape.of([SequenceChunk(1, context)] * 64))
        for context in (100, 4_100, 8_200)
    )
    # Every second layer sees no more than 4,096 keys.
    assert far - short == pytest.approx(2 * (farther - far), rel=0.1)
    with pytest.raises(CostModelError, match="window of 4096 tokens, and the step's chunks"):
        costs.step_seconds(StepShape(64, 6_400, 6_400))


def test_graphs_cost_on_another_device_what_they_do_there() -> None:
    h100 = simulated_program(MODEL, "H100", finetuning_tokens=1024).costs
    moved = program().costs.on(find_cost_model("H100"))
    shape = StepShape.of([SequenceChunk(1024, 0, True, True, "trained", 16)])
    assert moved.step_seconds(shape) == h100.step_seconds(shape)
    assert moved.backward_seconds(3, shape) == h100.backward_seconds(3, shape)
    assert moved.update_seconds() == h100.update_seconds()
    assert moved.step_seconds(shape) < program().costs.step_seconds(shape)


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_adapters_outside_the_layers_take_memory_and_time(target: str) -> None:
    config = resolve(MODEL).config
    size = config["vocab_size"] + config["hidden_size"]
    adapted = simulated_program(MODEL, "A100-80", targets=[target], finetuning_tokens=64)
    assert adapted.costs.trained == 16 * size
    assert adapted.adapter("a", 8).size_bytes == 2 * 8 * size
    trains = StepShape.of([SequenceChunk(64, 0, is_trained=True, adapter=0, rank=16)])
    first, second = (adapted.costs.backward_seconds(layer, trains) for layer in (0, 1))
    if target == "embed_tokens":
        base = StepShape.of([SequenceChunk(64, 0)])
        assert adapted.costs.step_seconds(trains) > adapted.costs.step_seconds(base)
        assert first > second
