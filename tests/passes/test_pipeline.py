"""The pipeline: what runs, what is printed of it, and that no wrong graph gets past it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest

import pcg.compiler as compiler
from pcg.compiler import compile_program
from pcg.errors import BrokenGraphError, PassError, UnsupportedError, VerifyError
from pcg.ir.graph import Graph, Node
from pcg.ir.parser import parse_graphs
from pcg.ir.types import TensorType
from pcg.options import PlanOptions
from pcg.passes.fusion.fuse_products import FuseLora
from pcg.passes.fusion.group_kernels import GroupKernels
from pcg.passes.graphs.localize import Localize
from pcg.passes.graphs.pass_base import GraphPass, On, Pass, PassRecord, Stage
from pcg.passes.pipeline import Pipeline, Settings, pipeline
from pcg.passes.registry import PASSES, REFUSED
from tests.support.families import BY_NAME

CONFIG = BY_NAME["llama3"].config(2)


def names(stage: Stage[Any, Any]) -> list[Any]:
    """The names of a stage's passes, those of a stage within it in a list."""
    return [names(one) if isinstance(one, Stage) else one.name for one in stage.passes]


def test_the_list_shows_all_that_runs() -> None:
    every = pipeline(Settings(PlanOptions(tp=2), backend="triton", windows=True))
    assert {stage.name: names(stage) for stage in every.stages} == {
        "trace": ["trace"],
        "fold": ["fold", "quantize_weights"],
        "raise": ["raise"],
        "attach": ["attach"],
        "parallelize": [
            "split_fused_projections",
            "plan_base",
            "repeat_heads",
            "shard",
            "localize",
        ],
        "differentiate": ["add_loss", "differentiate"],
        "prune": ["prune"],
        "place": [],
        "compress": ["window_attention", "compress"],
        "rematerialize": ["rematerialize", "coalesce_collectives", "overlap"],
        "fuse": [
            [
                *("fuse_linears", "fuse_lora", "coalesce_collectives", "overlap", "mark_logits"),
                "defer_residual_add",
                "defer_lora",
            ],
            ["fuse_linears", "join_lora", "fuse_gradients", "join_lora", "fuse_loss"],
        ],
        "emit": [
            *("functions", "split_cache_append", "group_kernels", "side_by_side", "order_kernels"),
            "emit",
        ],
    }
    assert names(pipeline(Settings()).emit) == ["functions", "fuse_rope", "emit"]
    # Each is a pass over text, or it is said why not.
    assert set(every.names) <= {one.name for one in PASSES} | REFUSED.keys() | {
        *("fuse_serving", "fuse_training")
    }


def test_a_name_stands_for_a_pass_or_for_the_end_of_a_stage() -> None:
    records: list[PassRecord] = []
    compile_program(CONFIG, "lora", observe=records.append)
    labels = Counter(label for record in records for label in record.labels)
    once = pipeline(Settings()).names
    twice = {"fuse_linears", "coalesce_collectives", "overlap"}  # of what serves, and what trains
    assert labels == {name: 2 if name in twice else 1 for name in once}
    by_label = {label: record for record in records for label in record.labels}
    assert by_label["rematerialize"].name == "overlap"
    assert by_label["fuse"].labels == ("fuse_linears", "fuse", "fuse_training")


def test_graphs_are_shown_by_what_they_are_for() -> None:
    records: list[PassRecord] = []
    compile_program(CONFIG, "lora", observe=records.append)
    shown = {record.name: list(record.graphs) for record in records}
    model = ["prologue", "block_0", "epilogue"]
    assert shown["raise"] == model
    assert shown["attach"] == [f"{kind}.{g}" for kind in ("serving", "training") for g in model]
    layers = [f"block_0{kind}" for kind in ("_first", "")]
    serving = [f"serving.{name}" for name in model]
    pairs = [f"training.{name}{way}" for name in layers for way in ("", "_backward")]
    losses = [f"training.epilogue_{name}" for name in ("loss", "loss_backward")]
    assert shown["prune"] == [*serving, "training.prologue", *pairs, *losses]
    pairs = [f"training.{name}{way}" for name in layers for way in ("_forward", "_backward")]
    losses = [f"training.epilogue_{name}" for name in ("train", "loss")]
    emitted = [*serving, "serving.last_hidden", "training.prologue", *pairs, *losses]
    assert shown["emit"] == emitted
    text = records[-1].text()
    assert [graph.name for graph in parse_graphs(text)] == shown["emit"]


# ----------------------------------------------------------------------------- what goes wrong


def narrowed(graph: Graph) -> Graph:
    """The graph with a wrong type of its first silu."""

    def changed(node: Node) -> Node:
        if node.op != "silu":
            return node
        value = node.output
        wrong = TensorType("i32", value.type.dims)
        return dataclasses.replace(node, outputs=(dataclasses.replace(value, type=wrong),))

    return graph.replace(nodes=tuple(map(changed, graph.nodes)))


def breaking(monkeypatch: pytest.MonkeyPatch, kind: type[GraphPass]) -> None:
    """Let a pass make silu ill-typed."""
    run = kind.run
    monkeypatch.setattr(kind, "run", lambda self, graph: narrowed(run(self, graph)))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_wrong_graph_that_serves_is_found_beside_one_that_trains(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaking(monkeypatch, FuseLora)
    with pytest.raises(
        BrokenGraphError, match=r"pass 'fuse_lora' made .* serving.block_0: .*silu"
    ) as e:
        compile_program(CONFIG, "lora", backend=backend)
    assert isinstance(e.value, PassError)
    assert isinstance(e.value, VerifyError)
    (before,) = parse_graphs(e.value.graph)
    assert before.name == "serving.block_0"
    ops = {node.op for node in before.nodes}
    assert {"silu", "linear_group", "shrink"} <= ops
    assert "lora_linear" not in ops


@pytest.mark.parametrize(
    ("kind", "options", "name"),
    [
        (GroupKernels, {"backend": "triton"}, "group_kernels"),
        (Localize, {"tp": 2}, "localize"),
    ],
    ids=["for codegen", "over ranks"],
)
def test_passes_for_codegen_and_ranks_are_verified(
    kind: type[GraphPass], options: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaking(monkeypatch, kind)
    with pytest.raises(BrokenGraphError, match=f"pass '{name}' made a wrong graph") as e:
        compile_program(CONFIG, "lora", **options)
    assert parse_graphs(e.value.graph)


class _Failing(Pass[Any, Any]):
    """A pass that trips."""

    name = "trip"
    error: Exception = KeyError("missing")

    def run(self, before: Any) -> Any:
        raise self.error


def with_failing(monkeypatch: pytest.MonkeyPatch, failing: Pass[Any, Any]) -> None:
    def changed(settings: Settings) -> Pipeline:
        found = pipeline(settings)
        return dataclasses.replace(found, prune=Stage("prune", (*found.prune.passes, failing)))

    monkeypatch.setattr(compiler, "pipeline", changed)


def test_a_pass_that_fails_is_named_and_carries_all_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    with_failing(monkeypatch, _Failing())
    with pytest.raises(PassError, match="pass 'trip' failed: KeyError: 'missing'") as e:
        compile_program(CONFIG, "lora")
    graphs = {graph.name for graph in parse_graphs(e.value.graph)}
    assert {"serving.block_0", "training.block_0_backward"} <= graphs


def test_what_a_pass_refuses_is_not_its_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = _Failing()
    object.__setattr__(failing, "error", UnsupportedError("not that"))
    with_failing(monkeypatch, failing)
    with pytest.raises(UnsupportedError, match="not that"):
        compile_program(CONFIG, "lora")


def test_stages_are_cut_before_a_pass() -> None:
    over_ranks = pipeline(Settings(PlanOptions(tp=2))).parallelize
    found = [one.name for one, _ in over_ranks.until(On).flat()]
    assert found == []
