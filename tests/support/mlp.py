"""A small MLP layer as text IR, and a model of two of them."""

from __future__ import annotations

import dataclasses

from pcg.ir.parser import parse_graph
from pcg.ir.program.program import ModelGraph, TrainingGraph
from pcg.passes.graphs.gradients import Prune
from pcg.passes.memory.recompute import plan_layer
from pcg.passes.memory.save_problem import SaveProblem
from pcg.passes.model_passes import layer_kinds

MLP = """
graph @block_0(%x: f32[T, 4]) {
  frozen %norm.weight: f32[4] = "model.layers.{layer}.norm.weight"
  frozen %up.weight: f32[6, 4] = "model.layers.{layer}.up.weight"
  frozen %down.weight: f32[4, 6] = "model.layers.{layer}.down.weight"
  frozen %down.bias: f32[4] = "model.layers.{layer}.down.bias"
  %norm: f32[T, 4] = rms_norm(%x, %norm.weight) {eps=1e-06, offset=0.0, round_first=True}  @norm
  %up: f32[T, 6] = linear(%norm, %up.weight)  @up
  %relu: f32[T, 6] = relu(%up)
  %down: f32[T, 4] = linear(%relu, %down.weight, %down.bias)  @down
  %add: f32[T, 4] = add(%x, %down)
  return %add
}
"""

PROLOGUE = """
graph @prologue(%input_ids: i64[T], %position_ids: i64[T]) {
  frozen %embed.weight: f32[9, 4] = "embed.weight"
  %embed: f32[T, 4] = embedding(%embed.weight, %input_ids)  @embed
  return %embed
}
"""

EPILOGUE = """
graph @epilogue(%x: f32[T, 4]) {
  frozen %embed.weight: f32[9, 4] = "embed.weight"
  %head: f32[T, 9] = linear(%x, %embed.weight)  @head
  return %head
}
"""


def mlp_model() -> ModelGraph:
    """Two layers of the MLP; the head is tied to the embeddings."""
    return ModelGraph(parse_graph(PROLOGUE), (parse_graph(MLP),), (0, 0), parse_graph(EPILOGUE))


def inner_plan(model: ModelGraph) -> TrainingGraph:
    """How the second layer is trained where no product is made again."""
    kind = layer_kinds(model)[-1]
    gradients = Prune().run(kind.gradients)
    kind = dataclasses.replace(kind, gradients=gradients)
    choice = SaveProblem(gradients.graph, gradients.needed, kind.shared, 1, 8).choose(1, None)
    return plan_layer(kind, choice.saved, "layer")
