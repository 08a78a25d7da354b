"""Plans of what serves: for decoding and for prompts, whatever step is finetuned."""

from __future__ import annotations

from functools import cache

import pytest

from pcg.ir.program.program import ModelGraph
from pcg.options import PlanOptions
from pcg.parallel.costs.accelerators import SHEETS
from pcg.parallel.costs.catalog import find_cost_model
from pcg.parallel.costs.layer_costs import CONTEXT_TOKENS, DeviceCosts
from pcg.passes.attach import Bypasses
from pcg.passes.pipeline import Settings, pipeline
from pcg.passes.shard import Shard
from pcg.passes.stages import Attached, Prepared, Sharded
from pcg.source import resolve
from tests.support.bypasses import lora
from tests.support.parallelized import attached_to
from tests.support.parameters import mostly_slow

DECODED = (1, 2, 24, 128, 256)


@cache
def large(model: str) -> Attached:
    def bypasses(base: ModelGraph) -> Bypasses:
        sites = (site for site in base.linear_sites() if "{layer}" in site)
        return lora(dict.fromkeys(sites, 16), dtype="f32")

    return attached_to(resolve(model).config, bypasses, "bfloat16")


def settings(sheet: str, degree: int, **options: int) -> Settings:
    return Settings(PlanOptions(tp=degree, **options), costs=find_cost_model(sheet))


def excess(model: str, sheet: str, degree: int, tokens: int) -> float:
    """By how much a serving plan's step takes longer than the best plan of that step alone."""
    given = settings(sheet, degree, seq=4096)
    prepared = pipeline(given).parallelize.until(Shard).run(large(model))
    assert isinstance(prepared, Prepared)
    plan = Shard(degree, steps=given.serving_costs).searches(prepared.serving, prepared, False)[0]
    costs = DeviceCosts(find_cost_model(sheet), degree, tokens, CONTEXT_TOKENS)
    (alone,) = Shard(degree, costs).searches(prepared.serving, prepared, False)
    return plan.at(costs, plan.plan()).value / alone.costs.of(alone.plan()).value - 1


@pytest.mark.parametrize("sheet", mostly_slow(["A100-80", "A10G"], "A10G"))
def test_decoding_is_planned_for_itself(sheet: str) -> None:
    assert max(excess("meta-llama/Llama-3.1-8B", sheet, 8, tokens) for tokens in (1, 256)) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("degree", [2, 8])
@pytest.mark.parametrize("model", ["meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B"])
def test_decoding_is_within_a_hundredth_of_the_best_on_every_sheet(model: str, degree: int) -> None:
    found = {s: max(excess(model, s, degree, tokens) for tokens in DECODED) for s in SHEETS}
    assert max(found.values()) < 0.01, found


def test_what_serves_does_not_depend_on_what_is_finetuned() -> None:
    found = []
    for seq in (16, 4096):
        passes = pipeline(settings("A100-80", 8, seq=seq))
        sharded = passes.parallelize.run(large("meta-llama/Llama-3.1-8B"))
        assert isinstance(sharded, Sharded)
        found.append(sharded)
    assert found[0].serving == found[1].serving
    assert found[0].training != found[1].training
