"""What a rank sends of a whole model is what the report says, with what a memory budget repeats."""

from __future__ import annotations

from typing import Any

import pytest

import pcg
from pcg.runtime.data.example import Example
from tests.support.families import BY_NAME
from tests.support.parameters import mostly_slow
from tests.support.ranked import LAYERS, make_executor, make_program, recipes
from tests.support.threads import ThreadRanks, run_ranks

SEQ = 48


def counted_and_said(
    name: str, degree: int, layers: int = LAYERS, **options: Any
) -> tuple[list[int], dict[str, int]]:
    """Bytes and messages of a batch's forward and backward over ranks, and what the report says."""
    recipe = recipes(BY_NAME[name])["a"]
    options = {"batch": 1, "seq": SEQ, "dtype": "float32", **options}
    program = make_program(name, degree, layers, peft={"a": recipe}, **options)
    report = pcg.explain(program.config, recipe, tp=degree, **options)

    def act(ranks: ThreadRanks) -> list[int]:
        runner = make_executor(program, name, ranks).training_runner("a")
        before = sum(ranks.moved_bytes.values()), sum(ranks.messages.values())
        runner.forward_backward([Example([3] * SEQ, [3] * SEQ)], 1.0)
        after = sum(ranks.moved_bytes.values()), sum(ranks.messages.values())
        return [now - then for now, then in zip(after, before, strict=True)]

    found, *others = run_ranks(degree, act)
    assert all(other == found for other in others)
    return found, report.to_json()["parallel"]["total"]


@pytest.mark.parametrize(
    ("name", "degree", "options"),
    mostly_slow(
        [
            ("llama3", 2, {}),
            ("llama3", 2, {"memory_budget": 0.5}),
            ("gpt2", 2, {"memory_budget": 0}),
            ("llama3", 2, {"memory_budget": 0, "sequence_parallel": True}),
        ],
        ("llama3", 2, {}),
    ),
)
def test_a_batch_sends_what_the_report_says(
    name: str, degree: int, options: dict[str, Any]
) -> None:
    (sent, messages), said = counted_and_said(name, degree, **options)
    assert sent == pytest.approx(said["forward_bytes"] + said["backward_bytes"], rel=0.01)
    assert messages == said["forward_messages"] + said["backward_messages"]
    assert bool(said["repeated_messages"]) == ("memory_budget" in options)


def test_a_budget_below_one_input_a_layer_repeats_whole_layers() -> None:
    name, layers = "gpt2", 4
    config = make_program(name, 2, layers).config
    recipe = recipes(BY_NAME[name])["a"]
    least = pcg.explain(config, recipe, tp=2, batch=1, seq=SEQ, dtype="float32").pareto[-1]
    assert least.restored
    (sent, messages), said = counted_and_said(name, 2, layers, memory_budget=f"{least.bytes}B")
    assert sent == pytest.approx(said["forward_bytes"] + said["backward_bytes"], rel=0.01)
    assert messages == said["forward_messages"] + said["backward_messages"]
    assert said["repeated_messages"] > said["forward_messages"] // 4
