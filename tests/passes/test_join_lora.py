"""LoRA of sites of one input in one operator: what is joined, and what stays apart."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from pcg.compiler import compile_program
from pcg.ir.analysis.verifier import verify
from pcg.ir.graph import Graph
from pcg.passes.fusion.fuse_gradients import FuseGradients
from pcg.passes.fusion.join_lora import JoinLora
from tests.support.families import BY_NAME

LORA: dict[str, Any] = {"peft_type": "LORA", "r": 4, "target_modules": "all-linear"}
GROUPS = ("shrink_group", "expand_add_group", "lora_group_backward", "asked_outer_group")


def joined(recipe: dict[str, Any], **options: Any) -> tuple[Graph, Graph]:
    """Forward and backward of a layer of Llama's that is not the first."""
    program = compile_program(BY_NAME["llama3"].config(2), recipe, **options)
    assert program.training is not None
    plan = program.training.plans[-1]
    assert plan.backward is not None
    found = JoinLora().run(plan.forward), JoinLora().run(FuseGradients().run(plan.backward))
    for graph in found:
        verify(graph)
    assert [found[1].types[name] for name in found[1].outputs] == [
        plan.backward.types[name] for name in plan.backward.outputs
    ]
    return found


def sites(graph: Graph, op: str) -> list[int]:
    """Sites of each operator of that name."""
    kinds = {"shrink_group": 1, "expand_add_group": 3, "lora_group_backward": 5}
    nodes = [node for node in graph.nodes if node.op == op]
    plain = [dict(node.attributes).get("plain", 0) for node in nodes]
    counts = [len(node.inputs) - 2 * int(none) for node, none in zip(nodes, plain, strict=True)]
    return sorted(count // kinds.get(op, 1) for count in counts)


def test_q_k_v_and_gate_up() -> None:
    forward, backward = joined(LORA)
    counts = Counter(node.op for node in (*forward.nodes, *backward.nodes))
    assert [counts[op] for op in GROUPS] == [2, 2, 2, 2]
    # o and down are alone.
    assert [counts[op] for op in ("shrink", "expand_add", "lora_linear_backward")] == [2, 2, 2]
    assert sites(forward, "expand_add_group") == [2, 3]
    assert sites(backward, "lora_group_backward") == [2, 3]
    apart = joined({**LORA, "target_modules": ["o_proj", "down_proj"]})[1]
    assert not any(node.op in GROUPS for node in apart.nodes)


@pytest.mark.parametrize(
    ("recipe", "forward", "backward"),
    [
        ({**LORA, "target_modules": ["q_proj", "v_proj"]}, [2], [2]),
        # k has another rank than q and v.
        ({**LORA, "rank_pattern": {"k_proj": 8}}, [2, 2], [2, 2]),
        # Each site has a mask of its own.
        ({**LORA, "lora_dropout": 0.1}, [], []),
        ({**LORA, "use_rslora": True}, [2, 3], [2, 3]),
    ],
    ids=["some", "ranks", "dropout", "rslora"],
)
def test_what_is_joined(recipe: dict[str, Any], forward: list[int], backward: list[int]) -> None:
    graphs = joined(recipe)
    assert sites(graphs[0], "expand_add_group") == forward
    assert sites(graphs[1], "lora_group_backward") == backward


def test_weights_without_lora_are_summed_with_others() -> None:
    """k's gradient is no summand of its own where q and v have LoRA."""
    _, backward = joined({**LORA, "target_modules": ["q_proj", "v_proj"]})
    (group,) = (node for node in backward.nodes if node.op == "lora_group_backward")
    assert dict(group.attributes) == {"plain": 1}
    assert group.inputs[3:6] == tuple(f"self_attn.{name}_proj.weight" for name in "qvk")


@pytest.mark.parametrize("budget", [0.0, 1.0])
@pytest.mark.parametrize("degree", [1, 2])
def test_graphs_stay_in_order(degree: int, budget: float) -> None:
    """Whatever is made again, over ranks too."""
    joined(LORA, tp=degree, memory_budget=budget, batch=2, seq=16)
