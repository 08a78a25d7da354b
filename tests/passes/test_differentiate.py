"""Backward graphs as text: what is saved, what is built, what is refused; and their numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given

from pcg.errors import UnsupportedError
from pcg.ir.analysis.verifier import verify
from pcg.ir.graph import Graph
from pcg.ir.module_paths import WHOLE_MODEL
from pcg.ir.parser import parse_graph
from pcg.ir.printer import print_graph
from pcg.ir.program.program import ModelGraph
from pcg.passes.attach import Bypasses, attach
from pcg.passes.graphs.differentiate import Differentiate, Differentiated, LayerKind
from pcg.passes.graphs.gradients import Prune
from pcg.passes.memory.recompute import plan_layer
from pcg.passes.model_passes import layer_kinds
from pcg.passes.pipeline import Settings, pipeline
from pcg.passes.stages import Attached, TrainedModel
from pcg.peft.lora import LoraBypass
from pcg.peft.prompt import PromptBypass
from tests.support.bypasses import lora
from tests.support.chain import STEPS, chain
from tests.support.evaluate import evaluate, random_values
from tests.support.mlp import mlp_model

UP, DOWN, HEAD = "model.layers.{layer}.up", "model.layers.{layer}.down", "head"


def pruned_kinds(model: ModelGraph) -> list[LayerKind]:
    return [
        dataclasses.replace(kind, gradients=Prune().run(kind.gradients))
        for kind in layer_kinds(model)
    ]


def adapted(*sites: str) -> Graph:
    return attach(mlp_model(), lora(dict.fromkeys(sites, 2))).blocks[0]


def pruned(graph: Graph, wrt: Sequence[str]) -> Differentiated:
    return Prune().run(Differentiate(wrt=tuple(wrt)).run(graph))


def trained_model(model: ModelGraph) -> TrainedModel:
    found = pipeline(Settings()).trained(Attached(model, model, model)).training
    assert found is not None
    return found


def test_text() -> None:
    found = pruned(adapted(DOWN), ["x"])
    verify(found.backward)
    # Of the frozen products nothing is saved; of relu and the norm, what their gradients read.
    assert found.needed == ("down_s", "relu", "x")
    assert found.trained == ("down.lora_A", "down.lora_B")
    after = """
graph @block_0_backward(%d_add: f32[T, 4], %down_s: f32[T, 2], %relu: f32[T, 6], %x: f32[T, 4]) {
  adapter %down.lora_B: f32[4, 2] = "model.layers.{layer}.down.lora_B"
  adapter %down.lora_A: f32[2, 6] = "model.layers.{layer}.down.lora_A"
  frozen %down.weight: f32[4, 6] = "model.layers.{layer}.down.weight"
  frozen %up.weight: f32[6, 4] = "model.layers.{layer}.up.weight"
  frozen %norm.weight: f32[4] = "model.layers.{layer}.norm.weight"
  %d_down_s: f32[T, 2] = expand_backward(%d_add, %down.lora_B)  @down
  %d_down.lora_B: f32[4, 2] = scaled_outer(%d_add, %down_s, %down.lora_B)  @down
  %shrink_backward: f32[T, 6] = shrink_backward(%d_down_s, %down.lora_A)  @down
  %d_down.lora_A: f32[2, 6] = outer(%d_down_s, %relu)  @down
  %linear_backward: f32[T, 6] = linear_backward(%d_add, %down.weight)  @down
  %d_relu: f32[T, 6] = add(%shrink_backward, %linear_backward)  @down
  %d_up: f32[T, 6] = relu_backward(%d_relu, %relu)
  %d_norm: f32[T, 4] = linear_backward(%d_up, %up.weight)  @up
  %rms_norm_backward: f32[T, 4] = rms_norm_backward(%d_norm, %x, %norm.weight)
    {eps=1e-06, offset=0.0}  @norm
  %d_x: f32[T, 4] = add(%d_add, %rms_norm_backward)  @norm
  return %d_x, %d_down.lora_A, %d_down.lora_B
}
"""
    assert print_graph(found.backward) == print_graph(parse_graph(after))


def test_without_the_inputs_gradient_the_chain_ends_at_the_adapter() -> None:
    found = Prune().run(Differentiate(wrt=("x",), wanted=()).run(adapted(DOWN)))
    ops = [node.op for node in found.backward.nodes]
    assert ops == ["expand_backward", "scaled_outer", "outer"]
    assert found.needed == ("down_s", "relu")


def test_a_gradient_that_meets_two_readers_is_their_sum() -> None:
    found = pruned(adapted(UP), ["x"])
    (total,) = [node for node in found.backward.nodes if node.outputs[0].name == "d_x"]
    assert total.op == "add"
    assert "d_add" in total.inputs


def test_frozen_layers_below_the_adapters_have_no_backward() -> None:
    (kind,) = pruned_kinds(mlp_model())
    assert kind.layers == (0, 1)
    plan = plan_layer(kind, kind.gradients.needed, "layer")
    assert (plan.backward, plan.saved, plan.trained) == (None, (), ())


def test_frozen_layers_above_an_adapter_only_pass_gradients_on() -> None:
    frozen = mlp_model()
    trained = attach(frozen, lora({UP: 2})).blocks[0]
    model = dataclasses.replace(frozen, blocks=(trained, frozen.blocks[0]), layers=(0, 1))
    first, above = pruned_kinds(model)
    assert (first.name, above.name) == ("block_0_first", "block_0")
    plan = plan_layer(above, above.gradients.needed, "layer")
    assert plan.backward is not None
    assert (plan.trained, plan.saved) == ((), ("x", "relu"))
    assert not any(p.role == "adapter" for p in plan.backward.parameters)


def test_an_operator_without_a_gradient_is_named() -> None:
    graph = parse_graph(
        """
graph @gates(%x: f32[T, 8], %y: f32[T, 8]) {
  %gate: f32[T, 8] = sigmoid_backward(%x, %y)
  return %gate
}
"""
    )
    with pytest.raises(UnsupportedError, match="operator 'sigmoid_backward' has no gradient"):
        Differentiate(wrt=("x",)).run(graph)


def test_what_is_trained_before_the_first_layer_asks_all_layers_for_gradients() -> None:
    model = attach(mlp_model(), Bypasses({UP: (LoraBypass(2),), WHOLE_MODEL: (PromptBypass(3),)}))
    (kind,) = layer_kinds(model)
    assert kind.gradients.wanted == ("x",)
    found = trained_model(model)
    backward = found.prologue
    assert found.prologue_trained == ("prompt_embeddings",)
    node = "virtual_tokens_backward(%d_embed_prompted, %prompt_embeddings)  @embed"
    text = f"""
graph @prologue_backward(%input_ids: i64[T], %position_ids: i64[T], %d_embed_prompted: f32[T, 4]) {{
  adapter %prompt_embeddings: f32[3, 4] = "prompt_embeddings"
  %d_prompt_embeddings: f32[3, 4] = {node}
  return %d_prompt_embeddings
}}
"""
    assert backward is not None
    verify(backward)
    assert print_graph(backward) == print_graph(parse_graph(text))


def test_nothing_is_trained_before_the_first_layer_of_plain_lora() -> None:
    found = trained_model(attach(mlp_model(), lora({UP: 2})))
    assert (found.prologue, found.prologue_trained) == (None, ())


# ---------------------------------------------------------------------------------------- numbers


def needed(found: Differentiated, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the backward reads of the forward."""
    forward = found.graph.replace(outputs=found.needed)
    return dict(zip(found.needed, evaluate(forward, values), strict=True))


def in_fp64(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {k: v.double() if v.is_floating_point() else v for k, v in values.items()}


def test_loss_with_an_adapter_on_the_head() -> None:
    found = trained_model(attach(mlp_model(), lora({HEAD: 2})))
    both, loss, trained = found.epilogue, found.loss, found.epilogue_trained
    for graph in (both, loss):
        verify(graph)
    assert trained == ("head.lora_A", "head.lora_B")
    assert both.outputs == ("loss", "d_x", "d_head.lora_A", "d_head.lora_B")
    values = in_fp64(random_values(both, tokens=5))
    values["targets"] = torch.tensor([3, -100, 0, 8, -100])
    names = ("x", *trained)
    for name in names:
        values[name].requires_grad_()
    (per_token,) = evaluate(loss, values)
    assert per_token[1] == per_token[4] == 0
    expected = torch.autograd.grad(per_token, [values[n] for n in names], values["d_loss"])
    with torch.no_grad():
        ours = evaluate(both, values)
    torch.testing.assert_close(ours[0], per_token.detach())
    for gradient, wanted in zip(ours[1:], expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-10, atol=1e-12)


@given(STEPS)
def test_any_chain_of_operators(steps: list[str]) -> None:
    graph = chain(steps)
    found = Differentiate(wrt=("x",)).run(graph)
    verify(found.backward)
    values = random_values(graph, tokens=3)
    names = ["x", *found.trained, *found.frozen]
    assert len(names) == 1 + 3 * steps.count("linear")
    for name in names:
        values[name].requires_grad_()
    (out,) = evaluate(graph, values)
    upstream = torch.ones_like(out)
    expected = torch.autograd.grad(out, [values[name] for name in names], upstream)
    with torch.no_grad():
        kept = needed(found, values)
        given_values = values | kept | {f"d_{graph.outputs[0]}": upstream}
        backward = evaluate(found.backward, given_values)
    for gradient, wanted in zip(backward, expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-11)
