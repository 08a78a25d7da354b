"""Pruning as text, and against a search for the nodes that a wanted gradient depends on."""

from __future__ import annotations

import networkx
from hypothesis import given
from hypothesis import strategies as st

from pcg.ir.analysis.verifier import verify
from pcg.ir.graph import Graph
from pcg.ir.parser import parse_graph
from pcg.ir.printer import print_graph
from pcg.passes.attach import attach
from pcg.passes.graphs.differentiate import Differentiate, Differentiated
from pcg.passes.graphs.gradients import Prune
from tests.support.bypasses import lora
from tests.support.chain import STEPS, chain
from tests.support.mlp import mlp_model

UP = "model.layers.{layer}.up"


def all_gradients() -> Differentiated:
    graph = attach(mlp_model(), lora({UP: 2})).blocks[0]
    return Differentiate(wrt=("x",), wanted=()).run(graph)


def test_text() -> None:
    found = all_gradients()
    assert found.frozen == ("up.weight", "down.weight", "down.bias")
    verify(found.backward)
    pruned = Prune().run(found)
    verify(pruned.backward)
    # Neither a frozen weight's gradient is left, nor what only the layer below would want.
    after = """
graph @block_0_backward(%d_add: f32[T, 4], %relu: f32[T, 6], %up_s: f32[T, 2], %norm: f32[T, 4]) {
  frozen %down.weight: f32[4, 6] = "model.layers.{layer}.down.weight"
  adapter %up.lora_B: f32[6, 2] = "model.layers.{layer}.up.lora_B"
  %d_relu: f32[T, 6] = linear_backward(%d_add, %down.weight)  @down
  %d_up_z: f32[T, 6] = relu_backward(%d_relu, %relu)
  %d_up_s: f32[T, 2] = expand_backward(%d_up_z, %up.lora_B)  @up
  %d_up.lora_B: f32[6, 2] = scaled_outer(%d_up_z, %up_s, %up.lora_B)  @up
  %d_up.lora_A: f32[2, 4] = outer(%d_up_s, %norm)  @up
  return %d_up.lora_A, %d_up.lora_B
}
"""
    assert print_graph(pruned.backward) == print_graph(parse_graph(after))
    assert (pruned.wrt, pruned.frozen) == ((), ())
    assert pruned.trained == ("up.lora_A", "up.lora_B")


def test_the_relu_that_only_the_frozen_product_read_is_no_longer_needed() -> None:
    down = "model.layers.{layer}.down"
    graph = attach(mlp_model(), lora({down: 2})).blocks[0]
    found = Differentiate(wrt=("x",)).run(graph)
    assert "norm" in found.needed  # the gradient of up.weight reads it
    assert "norm" not in Prune().run(found).needed


def ancestors(graph: Graph) -> set[str]:
    """The values that an output depends on, by networkx's own search."""
    view: networkx.DiGraph[str] = networkx.DiGraph()
    view.add_nodes_from(graph.types)
    for node in graph.nodes:
        view.add_edges_from((name, value.name) for value in node.outputs for name in node.inputs)
    found = set(graph.outputs)
    for name in graph.outputs:
        found |= networkx.ancestors(view, name)
    return found


@given(STEPS, st.booleans())
def test_what_is_left_is_what_wanted_gradients_depend_on(steps: list[str], passes_on: bool) -> None:
    wanted_inputs = ("x",) if passes_on else ()
    found = Differentiate(wrt=("x",), wanted=wanted_inputs).run(chain(steps))
    pruned = Prune().run(found)
    verify(pruned.backward)
    wanted = ancestors(found.backward.replace(outputs=pruned.backward.outputs))
    assert set(pruned.backward.types) == wanted
    before = [node for node in found.backward.nodes if node.name in wanted]
    assert list(pruned.backward.nodes) == before
