"""What a report says of ranks: strategies of all blocks, and where they change."""

from __future__ import annotations

from functools import cache

import pytest

import pcg
from pcg.explain.parallel_report import strategies, token_regions
from pcg.parallel.base_plan import COLUMN
from pcg.parallel.search import Search
from tests.support.families import BY_NAME
from tests.support.parallelized import attached, costs, search_layer


@cache
def searches() -> tuple[Search, ...]:
    """Of the two blocks of Gemma-2, whose attention differs."""
    state = attached("gemma2")
    assert state.training is not None
    pairs = zip(state.training.blocks, state.base.blocks, strict=True)
    return tuple(search_layer(block, plain, 2, costs(2)) for block, plain in pairs)


def test_blocks_that_differ_are_all_told() -> None:
    first, second = searches()
    same = strategies((first, second), (first.plan(), second.plan()))
    assert set(same) == {site.name for site in first.sites}
    site = first.sites[0]
    best = second.plan()
    other = second.force(best, second.sites[0], dict.fromkeys(second.sites[0].weights, COLUMN))
    found = strategies((first, second), (first.plan(), other))
    assert found[f"{first.graph.name}/{site.name}"] == same[site.name]
    assert found[f"{second.graph.name}/{site.name}"] == "FlexLLM 3, S-LoRA"
    assert site.name not in found
    assert found.items() >= {n: s for n, s in same.items() if n != site.name}.items()


def test_regions_say_the_context_of_their_costs() -> None:
    asked = []

    def searches_at(tokens: int, context: int) -> tuple[Search, ...]:
        asked.append((tokens, context))
        return searches()

    (row,) = token_regions(searches_at, 100)
    assert asked == [(4**power, min(4**power, 100)) for power in range(9)]
    assert (row["from_tokens"], row["to_tokens"]) == (1, 65_536)
    assert (row["from_context"], row["to_context"]) == (1, 100)


def test_the_text_has_every_context() -> None:
    """Also at degrees that divide neither the width nor the vocabulary."""
    report = pcg.explain(BY_NAME["falcon-40b"].config(2), tp=2, seq=48, find_region=True)
    assert report.to_json()["parallel"]["context"] == 48
    assert "for 48 tokens in sequences of 48" in report.to_text()
    text = report.to_text(formulas=True)
    assert "best strategies, as asked, in sequences of 48 tokens at most" in text


def test_batches_of_an_optimizer_step_are_said() -> None:
    config = BY_NAME["llama3"].config(2)
    options = {"tp": 2, "seq": 48, "batch": 1}
    one, many = (
        pcg.explain(config, gradient_accumulation_steps=batches, **options) for batches in (1, 8)
    )
    assert many.to_json()["parallel"]["gradient_accumulation_steps"] == 8
    assert "once an optimizer step, of 8 batches" in many.to_text()
    assert "of which each of its 8 batches pays a part" in many.to_html()
    assert "batches" not in one.to_text()


def test_requests_that_are_served_beside_have_a_plan_of_their_own() -> None:
    config = BY_NAME["llama3"].config(2)
    report = pcg.explain(config, tp=2, seq=48, serve_tokens=64)
    (block,) = report.to_json()["parallel"]["serving"]
    assert len(block["sites"]) == 7
    steps = {step["tokens"]: step for step in block["steps"]}
    assert [*steps] == [1, 4, 16, 64, 256, 2048]
    assert steps[256]["bytes"] == 256 * steps[1]["bytes"] > 0
    assert steps[2048]["layer_us"] > steps[1]["layer_us"]
    text = report.to_text()
    assert "serving plan, the best of all these steps together" in text
    assert "2,048 tokens" in text
    assert "serving" not in pcg.explain(config, tp=2, seq=48).to_json()["parallel"]


def test_launches_of_the_host_are_said_of_gpus() -> None:
    """Steps over ranks are not recorded; a CPU has no launches to wait for."""
    config = BY_NAME["llama3"].config(2)
    on = {device: pcg.explain(config, tp=2, seq=48, device=device) for device in ("cuda", "cpu")}
    text = "takes 1 ms to launch a step that decodes, as none is recorded over ranks"
    assert text in on["cuda"].to_text()
    assert text not in on["cpu"].to_text()
    assert on["cuda"].to_json()["parallel"]["host_ms"] == pytest.approx(0.87)
    assert on["cpu"].to_json()["parallel"]["host_ms"] is None
