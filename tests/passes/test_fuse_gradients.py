"""The gradients of a base product and of its LoRA in one operator, where nothing is between."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from pcg.compiler import compile_program
from pcg.ir.analysis.verifier import verify
from pcg.ir.graph import Graph
from pcg.ir.operators import operator
from pcg.passes.fusion.fuse_gradients import FuseGradients
from pcg.passes.registry import run_text
from tests.support.families import BY_NAME
from tests.support.parameters import mostly_slow

LORA: dict[str, Any] = {"peft_type": "LORA", "r": 4, "target_modules": "all-linear"}
LAYER = 7
"""Linear operators of a layer of Llama's."""


def backwards(name: str, recipe: dict[str, Any]) -> list[Graph]:
    """Of the first layer and of the others, for PyTorch."""
    program = compile_program(BY_NAME[name].config(2), recipe)
    assert program.training is not None
    found = [plan.backward for plan in program.training.plans]
    return [graph for graph in found if graph is not None]


def counts(graph: Graph) -> Counter[str]:
    return Counter(node.op for node in graph.nodes)


def test_every_site_of_llama() -> None:
    first, rest = backwards("llama3", LORA)
    fused = FuseGradients().run(rest)
    verify(fused)
    before, after = counts(rest), counts(fused)
    assert after["lora_linear_backward"] == before["linear_backward"] == LAYER
    assert after["asked_outer"] == before["outer"] == LAYER
    gone = {"linear_backward", "expand_backward", "scaled_outer", "shrink_backward", "cast"}
    assert not gone & after.keys()
    # Of gate and up, and of q, k and v, their own sums stay; of each of the 7 LoRA's is gone.
    assert before["add"] - after["add"] == LAYER
    assert [fused.types[name] for name in fused.outputs] == [
        rest.types[name] for name in rest.outputs
    ]
    for node in fused.nodes:
        if node.op == "lora_linear_backward":
            types = tuple(fused.types[name] for name in node.inputs)
            assert operator(node.op).infer(types, {}) == tuple(v.type for v in node.outputs)
    # Nobody asks below q, k and v of the first layer, where there is no base's product.
    assert counts(FuseGradients().run(first))["lora_linear_backward"] == LAYER - 3
    assert counts(FuseGradients().run(first))["expand_backward"] == 3


@pytest.mark.parametrize(
    ("name", "recipe", "fused"),
    [
        # Masks are between A and the sum.
        ("llama3", {**LORA, "lora_dropout": 0.1}, 0),
        # Sites without LoRA have the base's product alone.
        ("llama3", {**LORA, "target_modules": ["q_proj", "down_proj"]}, 2),
        # One product of q, k and v.
        ("gpt_neox", LORA, 4),
        ("gpt2", {"peft_type": "BITFIT"}, 0),
        ("llama3", {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 3}, 0),
        ("llama3", {"peft_type": "VERA", "r": 4, "target_modules": ["q_proj"]}, 1),
        (
            "llama3",
            {"peft_type": "IA3", "target_modules": ["k_proj"], "feedforward_modules": []},
            0,
        ),
    ],
    ids=["dropout", "some", "joined", "bitfit", "prefix", "vera", "ia3"],
)
def test_where_there_is_something_to_fuse(name: str, recipe: dict[str, Any], fused: int) -> None:
    graph = backwards(name, recipe)[-1]
    found = FuseGradients().run(graph)
    verify(found)
    assert counts(found)["lora_linear_backward"] == fused
    sums = {op: counts(graph)[op] for op in ("inner", "sum_tokens")}
    assert {op: counts(found)[f"asked_{op}"] for op in sums} == sums
    if not fused and not any(sums.values()):
        assert found == graph


@pytest.mark.parametrize(
    ("function", "fused"), [("gelu", 2), ("gelu_new", 2), ("relu", 2), ("silu", 2), ("tanh", 0)]
)
def test_bottlenecks(function: str, fused: int) -> None:
    """Of a tanh what it made is kept, and nothing is left to make anew."""
    recipe = {"peft_type": "BOTTLENECK", "variant": "houlsby", "bottleneck_size": 8}
    graph = backwards("llama3", {**recipe, "non_linearity": function})[-1]
    found = FuseGradients().run(graph)
    verify(found)
    assert counts(found)["bottleneck_backward"] == fused
    assert counts(found)["asked_outer"] == fused
    assert counts(found)["expand_backward"] == 2 - fused
    assert [found.types[name] for name in found.outputs] == [
        graph.types[name] for name in graph.outputs
    ]


@pytest.mark.parametrize("budget", mostly_slow([0.0, 0.3, 1.0], 0.0))
@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("llama3", LORA),
        ("qwen2", {**LORA, "use_dora": True}),
        ("gpt_neox", {**LORA, "use_dora": True}),
        ("gpt2", LORA),
        ("llama3", {"peft_type": "BOTTLENECK", "variant": "houlsby", "bottleneck_size": 8}),
    ],
    ids=["llama3", "qwen2-dora", "gpt_neox-dora", "gpt2", "houlsby"],
)
def test_graphs_stay_in_order(
    name: str, recipe: dict[str, Any], degree: int, budget: float
) -> None:
    """Whatever is made again, over ranks too; and they can be emitted."""
    config = BY_NAME[name].config(2)
    program = compile_program(
        config, recipe, tp=degree, memory_budget=budget, backend="triton", batch=2, seq=16
    )
    assert program.training is not None
    for plan in program.training.plans:
        if plan.backward is not None:
            verify(plan.backward)


BEFORE = """\
graph @backward(%d: bf16[T, 8], %x: bf16[T, 16], %s: f32[T, 4]) {
  frozen %w: bf16[8, 16] = "w"
  adapter %a: f32[4, 16] = "lora_A"
  adapter %b: f32[8, 4] = "lora_B"
  %ds: f32[T, 4] = expand_backward(%d, %b)
  %db: f32[8, 4] = scaled_outer(%d, %s, %b)
  %dl: f32[T, 16] = shrink_backward(%ds, %a)
  %c: bf16[T, 16] = cast(%dl) {dtype="bf16"}
  %da: f32[4, 16] = outer(%ds, %x)
  %dw: bf16[T, 16] = linear_backward(%d, %w)
  %dx: bf16[T, 16] = add(%c, %dw)
  return %dx, %da, %db
}
"""
AFTER = """\
graph @backward(%d: bf16[T, 8], %x: bf16[T, 16], %s: f32[T, 4]) {
  frozen %w: bf16[8, 16] = "w"
  adapter %a: f32[4, 16] = "lora_A"
  adapter %b: f32[8, 4] = "lora_B"
  %ds: f32[T, 4], %db: f32[8, 4], %dw: bf16[T, 16] = lora_linear_backward(%d, %w, %a, %b, %s)
  %da: f32[4, 16] = asked_outer(%ds, %x) {of="da"}
  return %dw, %da, %db
}
"""


def test_what_it_makes_of_a_site() -> None:
    assert run_text(BEFORE, "fuse_gradients") == AFTER


def test_a_sum_that_is_read_elsewhere_stays() -> None:
    read = BEFORE.replace("return %dx,", "return %dx, %c,")
    assert run_text(read, "fuse_gradients") == read
