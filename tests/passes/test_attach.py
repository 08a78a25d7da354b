"""Attaching bypass networks, as text; and which sites recipes ask for."""

from __future__ import annotations

import pytest

from pcg.errors import AdapterError
from pcg.ir.analysis.verifier import verify
from pcg.ir.parser import parse_graph
from pcg.ir.printer import print_graph
from pcg.passes.attach import Bypasses, attach, bypasses_of
from pcg.peft.lora import LoraConfig
from tests.support.bypasses import lora
from tests.support.mlp import MLP, mlp_model

UP, DOWN, HEAD = "model.layers.{layer}.up", "model.layers.{layer}.down", "head"


def test_lora_stands_beside_its_linear_operator() -> None:
    model = attach(mlp_model(), lora({UP: 2, DOWN: None}))
    (block,) = model.blocks
    verify(block)
    # A site where adapters of several ranks meet has the rank r.
    after = """
graph @block_0(%x: f32[T, 4]) {
  frozen %norm.weight: f32[4] = "model.layers.{layer}.norm.weight"
  frozen %up.weight: f32[6, 4] = "model.layers.{layer}.up.weight"
  frozen %down.weight: f32[4, 6] = "model.layers.{layer}.down.weight"
  frozen %down.bias: f32[4] = "model.layers.{layer}.down.bias"
  adapter %up.lora_A: f32[2, 4] = "model.layers.{layer}.up.lora_A"
  adapter %up.lora_B: f32[6, 2] = "model.layers.{layer}.up.lora_B"
  adapter %down.lora_A: f32[r, 6] = "model.layers.{layer}.down.lora_A"
  adapter %down.lora_B: f32[4, r] = "model.layers.{layer}.down.lora_B"
  %norm: f32[T, 4] = rms_norm(%x, %norm.weight) {eps=1e-06, offset=0.0, round_first=True}  @norm
  %up: f32[T, 6] = linear(%norm, %up.weight)  @up
  %up_s: f32[T, 2] = shrink(%norm, %up.lora_A)  @up
  %up_z: f32[T, 6] = expand_add(%up, %up_s, %up.lora_B)  @up
  %relu: f32[T, 6] = relu(%up_z)
  %down: f32[T, 4] = linear(%relu, %down.weight, %down.bias)  @down
  %down_s: f32[T, r] = shrink(%relu, %down.lora_A)  @down
  %down_z: f32[T, 4] = expand_add(%down, %down_s, %down.lora_B)  @down
  %add: f32[T, 4] = add(%x, %down_z)
  return %add
}
"""
    assert print_graph(block) == print_graph(parse_graph(after))


def test_a_bias_of_the_adapters_own_replaces_the_base_s() -> None:
    model = attach(mlp_model(), Bypasses({}, frozenset({"model.layers.{layer}.down.bias"})))
    nodes = model.blocks[0].nodes
    ops = [node.op for node in nodes]
    assert ops == ["rms_norm", "linear", "relu", "linear", "bias_add", "add"]
    assert nodes[4].inputs == ("down", "down.bias.own", "down.bias")
    assert nodes[5].inputs == ("x", "bias_add")


def test_adapters_of_half_precision_models_are_fp32() -> None:
    text = MLP.replace("f32", "bf16")
    model = mlp_model().map(lambda graph: graph)
    model = model.__class__(model.prologue, (parse_graph(text),), model.layers, model.epilogue)
    (block,) = attach(model, lora({UP: 2}, dtype="f32")).blocks
    verify(block)
    types = block.types
    assert str(types["up.lora_A"]) == "f32[2, 4]"
    assert str(types["up_s"]) == "f32[T, 2]"
    assert str(types["up_z"]) == "bf16[T, 6]"


def test_a_tied_head_is_a_site_of_its_own() -> None:
    model = attach(mlp_model(), lora({HEAD: 3}))
    assert [node.op for node in model.epilogue.nodes] == ["linear", "shrink", "expand_add"]
    assert [node.op for node in model.prologue.nodes] == ["embedding"]
    assert {p.source for p in model.epilogue.parameters if p.role == "adapter"} == {
        "head.lora_A",
        "head.lora_B",
    }


def test_without_bypasses_nothing_changes() -> None:
    model = mlp_model()
    assert attach(model, Bypasses()) == model


@pytest.mark.parametrize(
    ("recipes", "ranks"),
    [
        ([LoraConfig(target_modules="all-linear", r=4)], {UP: 4, DOWN: 4}),
        ([LoraConfig(target_modules=("up",), r=4), LoraConfig(target_modules=("up", "head"))],
         {UP: 8, HEAD: 8}),
        # A site of one layer is one of its block: in the other layer nothing is added.
        ([LoraConfig(target_modules=("down",), layers_to_transform=(1,))], {DOWN: 8}),
        ([LoraConfig(target_modules=("up",), rank_pattern={"model.layers.0.up": 2})], {UP: 8}),
        ([], {}),
    ],
)  # fmt: skip
def test_sites_of_recipes(recipes: list[LoraConfig], ranks: dict[str, int | None]) -> None:
    found = bypasses_of(mlp_model(), recipes, "llama", "f32")
    ours = {site: [bypass.rank for bypass in at] for site, at in found.at.items()}
    assert ours == {site: [rank] for site, rank in ranks.items()}
    assert found.replaced == frozenset()


@pytest.mark.parametrize(
    ("bias", "targets", "expected"),
    [
        ("all", ("up",), {"model.layers.{layer}.down.bias"}),
        ("lora_only", ("up",), set()),
        ("lora_only", ("down",), {"model.layers.{layer}.down.bias"}),
    ],
)
def test_biases_of_recipes(bias: str, targets: tuple[str, ...], expected: set[str]) -> None:
    recipe = LoraConfig(target_modules=targets, bias=bias)
    assert bypasses_of(mlp_model(), [recipe], "llama", "f32").replaced == expected


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(AdapterError, match="target_modules has 'upp'"):
        bypasses_of(mlp_model(), [LoraConfig(target_modules=("upp",))], "llama", "f32")
