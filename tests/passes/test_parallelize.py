"""Layers over ranks: their plans, and outputs and gradients equal to those of one rank."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

import pcg
from pcg.compiler import compile_program
from pcg.errors import CostModelError, ParallelError
from pcg.ir.analysis.verifier import verify
from pcg.ir.graph import Graph, Node
from pcg.ir.layouts import REPLICATED, WHOLE, Layout, Sharding, of_experts
from pcg.ir.parser import parse_graph
from pcg.ir.printer import print_graph
from pcg.options import PlanOptions
from pcg.parallel.base_plan import COLUMN, EXPERTS, ROW, base_plan, partitioned_attentions
from pcg.parallel.costs.layer_costs import ByteCosts
from pcg.parallel.parallel_plan import Constraints
from pcg.parallel.planner import Planner
from pcg.passes.attach import Bypasses
from pcg.passes.graphs.pass_base import On
from pcg.passes.graphs.split_fused_projections import SplitFusedProjections
from pcg.passes.quantize_weights import experts_of
from pcg.passes.repeat_heads import RepeatHeads
from pcg.passes.shard import PlanBase
from tests.support.architectures import default_config
from tests.support.families import BY_NAME, FAMILIES
from tests.support.parallelized import (
    PLAN,
    attached,
    attached_to,
    base_over_ranks,
    sharded,
    transitions,
)
from tests.support.parameters import mostly_slow
from tests.support.sharded import errors, layer_errors

LAYOUTS = (WHOLE, REPLICATED, COLUMN, ROW)


@pytest.mark.parametrize("name", ["llama3", "qwen2", "gemma2", "olmo2", "cohere", "phi3"])
def test_plans_are_those_of_transformers(name: str) -> None:
    """Where transformers has a plan, by module, it parts the same products the same way."""
    from transformers import AutoConfig

    config = BY_NAME[name].config(2)
    theirs = AutoConfig.for_model(**config).base_model_tp_plan
    base = attached(name).base
    ours = base_plan(SplitFusedProjections().run(base.blocks[0]), 2)
    styles = {COLUMN: "colwise", ROW: "rowwise"}
    for module, style in theirs.items():
        kind = module.removeprefix("layers.*.")
        mine = {layout for n, layout in ours.items() if n.startswith(f"{kind}.weight")}
        if mine and not style.startswith(("replicated", "sequence", "packed")):
            assert {styles[layout] for layout in mine} == {style.partition("_")[0]}


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize(
    "name",
    mostly_slow(
        [family.name for family in FAMILIES if family.name not in ("mpt", "bloom")],
        *("llama2", "falcon-7b", "gpt_bigcode", "phi", "opt"),
    ),
)
def test_a_base_layer_says_two_words_to_the_others(name: str, degree: int) -> None:
    """One sum after attention and one after the MLP, or one after both, and no more."""
    base = attached(name).base
    try:
        found = base_over_ranks(base, degree)
    except ParallelError:
        pytest.skip("the degree divides neither heads nor products")
    for graph in found.training.graphs:
        verify(graph)
        assert parse_graph(print_graph(graph)) == graph
    if "norm" in name or name == "olmo2":
        return  # a norm over all heads gathers them
    for block in found.typed.blocks:
        words = transitions(block)
        assert words["reduce"] in (1, 2)
        assert set(words) <= {"place", "reduce", "take"}
    assert transitions(found.typed.prologue) == {"reduce": 1}
    assert transitions(found.typed.epilogue) == {"combine": 1}


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize(
    "name",
    mostly_slow(
        ["llama3", "qwen2", "opt", "gpt2", "falcon-7b", "gemma2", "falcon-40b", "gpt_bigcode"],
        *("opt", "falcon-7b"),
    ),
)
def test_outputs_and_gradients_are_those_of_one_rank(name: str, degree: int) -> None:
    state = attached(name)
    assert state.training is not None
    found = sharded(name, degree)
    pairs = zip(state.training.blocks, found.training.blocks, strict=True)
    for whole, local in pairs:
        worst = layer_errors(whole, local, degree)
        assert max(worst.values()) < 1e-5, worst


@pytest.mark.parametrize(("a", "b"), [*itertools.product(LAYOUTS, repeat=2)], ids=str)
def test_every_way_to_hold_lora_gives_the_same(a: Layout, b: Layout) -> None:
    state = attached("llama3")
    assert state.training is not None
    base = state.base.blocks[0]
    layouts = dict(base_plan(base, 2))
    heads = partitioned_attentions(base, layouts)
    block = RepeatHeads(2, tuple(heads)).run(state.training.blocks[0])
    for parameter in block.parameters:
        if parameter.role == "adapter":
            layouts[parameter.name] = a if parameter.name.endswith("lora_A") else b
    found = Planner(block, 2, ByteCosts(2)).plan(Constraints(layouts))
    assert found.held.items() <= layouts.items()
    assert max(errors(block, 2, found).values()) < 1e-5


def test_a_fused_projection_is_split_by_its_rows() -> None:
    base = attached("gpt2").base
    rows = [
        p.rows
        for p in SplitFusedProjections().run(base.blocks[0]).parameters
        if p.name.startswith("attn.c_attn.w")
    ]
    assert rows == [(0, 64), (64, 128), (128, 192)]


def test_the_users_plan_is_taken(tmp_path: Path) -> None:
    base = attached("llama2").base
    megatron = base_over_ranks(base, 2).typed
    assert base_over_ranks(base, 2, tp_plan=PLAN).typed == megatron
    without_mlp = {module: style for module, style in PLAN.items() if "mlp" not in module}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(without_mlp))
    given = PlanOptions(tp=2, tp_plan=path).styles
    assert given == without_mlp
    found = base_over_ranks(base, 2, tp_plan=given)
    # The MLP is whole on each rank: its sum is gone.
    assert transitions(found.typed.blocks[0])["reduce"] == 1
    for whole, local in zip(base.blocks, found.training.blocks, strict=True):
        assert max(layer_errors(whole, local, 2).values()) < 1e-5


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"self_attn.q_proj": "sideways"}, "'sideways'; use one of colwise, rowwise, replicated"),
        (
            {"self_attn.qq_proj": "colwise"},
            "qq_proj is no linear operator of block_0; it has",
        ),
        ({"self_attn.q_proj": ["colwise"]}, r"\['colwise'\]; use one of colwise, rowwise, repl"),
        ({"self_attn.q_proj": None}, "q_proj is None; use one of colwise, rowwise, replicated"),
        ({}, "an object with a style for each module path"),
        ("nowhere.json", "nowhere.json cannot be read: No such file"),
    ],
)
def test_a_plan_that_is_none_is_refused(plan: Any, message: str) -> None:
    with pytest.raises(ParallelError, match=message):
        pcg.explain(BY_NAME["llama3"].config(2), tp=2, tp_plan=plan)


def test_a_degree_that_does_not_fit_is_refused_with_those_that_do() -> None:
    message = r"tp=3 does not divide num_attention_heads=32 of block_0; use one of 1, 2, 4, 8, 16"
    with pytest.raises(ParallelError, match=message):
        pcg.explain("meta-llama/Llama-3.1-8B", tp=3)
    with pytest.raises(ParallelError, match="tp=0; use an int of at least 1"):
        pcg.explain("meta-llama/Llama-3.1-8B", tp=0)


MLP = {**dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), "colwise"), "mlp.down_proj": "rowwise"}


def test_what_a_plan_leaves_whole_need_not_be_divided() -> None:
    """An MLP alone over more ranks than there are heads."""
    base = attached("llama3").base
    block = base.blocks[0]
    (attention,) = (node for node in block.nodes if node.op == "attention")
    heads = block.types[attention.inputs[0]].features[-2]
    degree = 2 * heads
    with pytest.raises(ParallelError, match=f"num_attention_heads={heads}"):
        base_over_ranks(base, degree)
    found = base_over_ranks(base, degree, tp_plan=MLP)
    assert "repeat_interleave" not in {node.op for node in found.training.blocks[0].nodes}
    assert max(layer_errors(block, found.training.blocks[0], degree).values()) < 1e-5


def test_the_products_that_a_degree_divides_are_named_as_a_plan() -> None:
    """Falcon-7B has 71 heads, which only 71 ranks divide; its MLP is parallel to them."""
    sizes = {"hidden_size": 71 * 4, "num_attention_heads": 71, "num_hidden_layers": 1}
    config = {"model_type": "falcon", "vocab_size": 64, "multi_query": True, **sizes}
    with pytest.raises(
        ParallelError, match=r"of block_0; use one of 1, 71, or .* \(tp_plan=\)"
    ) as e:
        compile_program(config, tp=2)
    plan = json.loads(str(e.value).rpartition(" with ")[2])
    assert plan == {"mlp.dense_h_to_4h": "colwise", "mlp.dense_4h_to_h": "rowwise"}
    assert compile_program(config, tp=2, tp_plan=plan).options.styles == plan


def test_every_degree_that_fits_is_named() -> None:
    fitting = sorted(2**i * j for i in range(12) for j in (1, 7))  # 14336 = 2^11 · 7
    listed = ", ".join(map(str, fitting))
    message = f"tp=3 does not divide the rows of .*=14336 of block_0; use one of {listed}$"
    with pytest.raises(ParallelError, match=message):
        pcg.explain("meta-llama/Llama-3.1-8B", tp=3, tp_plan=MLP)


EXPERT_PLANS = {
    1: {COLUMN, ROW},
    2: {of_experts(-3, sharers=2, part=-2), of_experts(-3, sharers=2, part=-1)},
    4: {EXPERTS},
}
"""The layouts of experts' weights over four ranks, by ep."""


class Slow(ByteCosts):
    """Costs of products of experts by their layout, all but one high."""

    def __init__(self, ep: int) -> None:
        super().__init__(4)
        self.fast = EXPERT_PLANS[ep]

    def node(self, node: Node, graph: Graph, rule: Sharding, needs: tuple[bool, ...]) -> float:
        return float(node.op == "expert_linear" and rule.inputs[2] not in self.fast)


@pytest.mark.parametrize("ep", EXPERT_PLANS)
def test_ranks_have_experts_or_parts_of_them_by_what_costs_less(ep: int) -> None:
    model = attached_to(BY_NAME["mixtral"].config(1), lambda base: Bypasses())
    split = On("base.blocks", SplitFusedProjections()).run(model)
    found = PlanBase(4, costs=Slow(ep)).run(split)
    for block, layouts in zip(found.base.blocks, found.layouts, strict=True):
        assert {layouts[name] for name in experts_of(block)} == EXPERT_PLANS[ep]


def test_ranks_have_some_experts_where_no_parts_fit() -> None:
    """Three experts of 64 features over 3 ranks."""
    config = {**BY_NAME["mixtral"].config(1), "num_attention_heads": 12, "num_key_value_heads": 12}
    config |= {"hidden_size": 96, "intermediate_size": 64, "num_local_experts": 3}
    three = pcg.explain(config, "lora", tp=3)
    assert "by expert: partition A and B over the experts" in str(three)
    rows = {row["weight"]: row["layout"] for row in three.parallel["base"]}
    assert rows["mlp.experts.down_proj"] == "~-3"
    with pytest.raises(ParallelError, match=r"tp=3 does not divide the .*=64 of block_0"):
        pcg.explain(config, "lora", tp=3, ep=1)
    with pytest.raises(ParallelError, match=r"tp=4 .* experts of .*=3 .*use one of 1, 3, or ep=1"):
        pcg.explain(config, "lora", tp=4, ep=4)
    with pytest.raises(
        ParallelError, match=r"ep=2 of tp=4 ranks needs the experts of .*=3 .* in 2"
    ):
        pcg.explain(config, "lora", tp=4, ep=2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tp": 4, "ep": 3}, "ep=3 and tp=4: .* in equal parts; use one of 1, 2, 4, or leave"),
        ({"ep": 2}, "ep=2 and tp=1: .*; use tp=2 with it, or leave out ep=2"),
        ({"tp": 2, "ep": 0}, "ep=0; use an int of at least 1"),
        ({"tp": 2, "ep": 2, "tp_plan": MLP}, "ep=2 and a tp_plan"),
        ({"tp": 2, "ep": 2}, "ep=2 has no effect for a model without experts"),
    ],
)
def test_degrees_of_experts_that_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ParallelError, match=message):
        pcg.explain(BY_NAME["llama3"].config(2), **given)


def test_blocks_of_a_recurrence_are_no_experts() -> None:
    with pytest.raises(ParallelError, match=r"ep=\d has no effect for a model without experts"):
        pcg.explain(default_config("recurrent_gemma", 3), None, tp=2, ep=2)


@pytest.mark.parametrize(
    "given",
    [{"costs": "H100"}, {"tp_plan": MLP}, {"gradient_accumulation_steps": 4}],
    ids=lambda given: next(iter(given)),
)
def test_what_is_said_of_ranks_is_refused_for_one(given: dict[str, Any]) -> None:
    config = BY_NAME["llama3"].config(2)
    (name,) = given
    message = f"{name}=.* has no effect with tp=1.*; give tp=2 or more .*, or leave {name} out"
    for act in (pcg.explain, pcg.compile, compile_program):
        with pytest.raises(ParallelError, match=message):
            act(config, **given)


def test_a_style_that_is_none_is_refused_with_its_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"self_attn.q_proj": ["colwise"]}')
    message = r"tp_plan .*plan\.json: self_attn.q_proj is \['colwise'\]; use one of colwise, rowwi"
    with pytest.raises(ParallelError, match=message):
        _ = PlanOptions(tp=2, tp_plan=path).styles


def test_a_device_without_costs_is_refused_by_name() -> None:
    with pytest.raises(CostModelError, match="no device sheet or profile is called 'gtx-1080'"):
        pcg.explain("meta-llama/Llama-3.1-8B", tp=2, costs="gtx-1080")


def test_what_is_shared_is_not_counted_as_trained() -> None:
    """Of VeRA a rank trains at most what one rank alone does, and at least its share."""
    config = BY_NAME["llama3"].config(2)
    one, two = (pcg.explain(config, "vera", tp=tp).memory_bytes["gradients"] for tp in (1, 2))
    assert one / 2 <= two <= one
