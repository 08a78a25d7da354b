"""Reports of adapters that differ by layer: groups of layers, their totals, and formulas."""

from __future__ import annotations

from typing import Any

import pytest
import sympy

import pcg
from pcg.source import resolve
from tests.support.families import BY_NAME
from tests.support.peft_cases import ALL

CONFIG = BY_NAME["llama3"].config(6)
LAST = pcg.LoraConfig(r=4, target_modules=tuple(ALL), layers_to_transform=(5,))
MIDDLE = pcg.LoraConfig(r=4, target_modules=("q_proj", "up_proj"), layers_to_transform=(2,))
RANKS = pcg.LoraConfig(
    r=4, target_modules=("q_proj", "v_proj"), rank_pattern={r"layers\.[01]\..*": 2}
)


def test_groups_of_layers_and_their_totals() -> None:
    report = pcg.explain(CONFIG, MIDDLE, seq=64)
    groups = report.layer_groups
    assert [group.layers for group in groups] == [(0, 1), (2,), (3, 4, 5)]
    assert [group.has_backward for group in groups] == [False, True, True]
    trained = 4 * (64 + 64) + 4 * (64 + 96)
    assert [group.trained for group in groups] == [0, trained, 0]
    assert report.parameters["trainable"] == trained
    outside = sum(
        row.bytes for row in report.saved if row.tensor.startswith(("prologue.", "epilogue."))
    )
    layers = sum(len(group.layers) * group.bytes for group in groups)
    assert layers + outside == report.memory_bytes["activations"]
    for group in groups:
        rows = [row for row in report.saved if row.tensor.startswith(f"{group.name}.")]
        assert {row.layers for row in rows} == {len(group.layers)}
        assert any(row.decision == "save" for row in rows) == group.has_backward
        assert bool(group.bytes) == group.has_backward
    assert "nothing is trained in the layer or below it" in report.to_text(tensors=True)


def test_the_text_shows_groups_where_layers_differ() -> None:
    report = pcg.explain(CONFIG, LAST, seq=64)
    assert "  0-4                            -         no backward\n" in report.to_text()
    # The graph is of the layer that is trained, though most are not.
    assert any(node.decision == "save" for node in report.graph)
    assert "trained a layer" not in pcg.explain(CONFIG, "lora", seq=64).to_text()
    assert report.to_json()["layer_groups"][0]["layers"] == [0, 1, 2, 3, 4]


def test_the_timeline_goes_back_to_the_lowest_trained_layer() -> None:
    labels = [moment.label for moment in pcg.explain(CONFIG, MIDDLE, seq=64).timeline]
    forward = [f"forward {layer}" for layer in range(6)]
    assert labels == [*forward, "loss", *(f"backward {layer}" for layer in (5, 4, 3, 2))]


@pytest.mark.parametrize("recipe", [LAST, MIDDLE, RANKS], ids=["last", "middle", "ranks"])
def test_formulas_give_the_bytes_of_other_steps(recipe: pcg.LoraConfig) -> None:
    report = pcg.explain(CONFIG, recipe, batch=2, seq=64, find_region=True)
    assert report.region is not None
    other: dict[str, Any] = {"batch": 3, "seq": 72}
    rank = None if recipe.rank_pattern else 5
    found = pcg.explain(CONFIG, recipe if rank is None else recipe.with_rank(rank), **other)
    values = {"B": 3, "S": 72, "r": rank}
    symbols = {name: sympy.Symbol(name, integer=True, positive=True) for name in values}
    for name, text in report.formulas.items():
        formula = sympy.sympify(text, locals=symbols)
        at = {symbols[key]: value for key, value in values.items() if value is not None}
        assert formula.subs(at) == found.memory_bytes[name], name


def test_one_trained_layer_of_llama_costs_one_layer() -> None:
    config = resolve("meta-llama/Llama-3.1-8B").config
    recipe = pcg.LoraConfig(r=16, target_modules=tuple(ALL), layers_to_transform=(31,))
    report = pcg.explain(config, recipe)
    every = pcg.explain(config, "lora")
    ours, eager, whole = report.stage("compressed"), report.stage("eager"), every.stage("eager")
    assert ours is not None
    assert eager is not None
    assert whole is not None
    # 101 MiB of eager's 790; on every layer 2,971.
    assert ours.bytes < 0.13 * eager.bytes
    assert [group.layers for group in report.layer_groups] == [tuple(range(31)), (31,)]
