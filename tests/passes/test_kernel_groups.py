"""Groups of nodes: each node runs once, and what a kernel can run is together."""

from __future__ import annotations

import pytest

from pcg.compiler import compile_program
from pcg.ir.analysis.kernel_group import KernelGroup
from pcg.ir.graph import Graph, Node
from pcg.ir.operators import operator
from pcg.ir.parser import parse_graph
from tests.support.families import BY_NAME
from tests.support.kernel_graphs import EVERY, graphs, groups, schedule


def operators(graph: Graph) -> list[str]:
    """Of each kernel; of its parts behind one another."""
    return [
        " | ".join(" ".join(node.op for node in part.nodes) for part in group.parts or (group,))
        for group in groups(graph)
    ]


@pytest.mark.parametrize("name", EVERY)
def test_every_node_runs_once_behind_what_it_reads(name: str) -> None:
    program = compile_program(BY_NAME[name].config(2))
    for graph in graphs(program):
        there = {*(value.name for value in graph.inputs), *graph.parameters_by_name}
        ran: list[Node] = []
        for item in schedule(graph):
            assert there.issuperset(item.inputs), (graph.name, item)
            nodes = item.nodes if isinstance(item, KernelGroup) else (item,)
            ran += nodes
            made = item.outputs if isinstance(item, KernelGroup) else [v.name for v in item.outputs]
            there.update(made)
        assert sorted(node.name for node in ran) == sorted(node.name for node in graph.nodes)
        assert there.issuperset(graph.outputs)


def test_what_one_kernel_can_run_is_one() -> None:
    program = compile_program(BY_NAME["llama3"].config(2))
    prologue, block, epilogue = program.serving.model.graphs
    assert operators(prologue) == ["cast mul concat"]
    assert operators(block) == ["rms_norm", "rope | rope", "add rms_norm", "silu mul"]
    assert operators(epilogue) == ["rms_norm"]
    assert program.training is not None
    backward = program.training.plans[1].backward
    assert backward is not None
    # What the plan makes again, silu · up, is made beside the gradients that read it.
    first, *_ = operators(backward)
    assert first == "silu mul add mul mul silu_backward"


def test_norms_of_queries_and_keys_are_one_with_the_rotation() -> None:
    program = compile_program(BY_NAME["qwen3"].config(2))
    assert "rms_norm rope | rms_norm rope" in operators(program.serving.model.blocks[0])


def test_attention_that_is_made_again_and_its_gradient_read_one_kernel() -> None:
    program = compile_program(BY_NAME["llama3"].config(2), memory_budget=0.0)
    assert program.training is not None
    backward = program.training.plans[0].backward
    assert backward is not None
    assert {"attention", "attention_backward"} <= {node.op for node in backward.nodes}
    assert operators(backward).count("rope | rope") == 1
    assert operators(backward).count("rope_backward | rope_backward") == 1


def test_a_path_through_another_node_keeps_groups_apart() -> None:
    """silu(x) is read by a product and, with that, by a sum: one kernel cannot wait for it."""
    program = compile_program(BY_NAME["gpt2"].config(2))
    for graph in graphs(program):
        for group in groups(graph):
            between = {node.name for node in graph.nodes if node.name not in group.made}
            reached = set(group.outputs)
            for node in graph.nodes:
                if node.name in between and reached.intersection(node.inputs):
                    reached.update(value.name for value in node.outputs)
            assert not (reached & between).intersection(group.inputs)


def test_a_view_that_its_kernel_reads_too_stays_inside() -> None:
    """Outside, it would wait for the kernel that waits for it."""
    graph = parse_graph("""\
graph @g(%x: f32[T, 2, 4]) {
  %silu: f32[T, 2, 4] = silu(%x)
  %flat: f32[T, 8] = reshape(%silu) {shape=(-1, 8)}
  %neg: f32[T, 8] = neg(%flat)
  return %flat, %neg
}
""")
    (group,) = groups(graph)
    assert group.outputs == ("flat", "neg")


def test_views_at_the_border_stay_outside() -> None:
    program = compile_program(BY_NAME["llama3"].config(2))
    for graph in graphs(program):
        for group in groups(graph):
            for node in group.nodes:
                if operator(node.op).is_view:
                    assert node.inputs[0] in group.made
                    assert not group.leaves(node)
