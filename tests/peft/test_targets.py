"""Targets that are embeddings are refused by name, except those of LoRA on tokens' embeddings."""

from __future__ import annotations

import re
import threading
from itertools import product
from typing import Any

import peft
import pytest

import pcg.compiler as compiler
from pcg.errors import AdapterError, UnsupportedError
from pcg.explain.explain import explain
from pcg.ir.module_paths import matches_end
from pcg.passes.pipeline import Settings, pipeline
from pcg.peft.registry import RECIPES, SHORTHANDS, recipe_from
from pcg.peft.targets import TargetedRecipe
from pcg.runtime.executor import Executor
from tests.support.architectures import CAUSAL_LMS, default_config
from tests.support.families import BY_NAME
from tests.support.models import folded
from tests.support.small_job import DATA, make_model

METHODS = [
    name
    for name, each in RECIPES.items()
    if issubclass(each, TargetedRecipe) and not each.adapts_embeddings
]
REGEX = r".*(q_proj|embed_tokens)"
BOTH = [REGEX, ["q_proj", "embed_tokens"], r"model\.(layers\..*_proj|embed_tokens)"]
REFUSED = "includes model.embed_tokens, an embedding"


@pytest.mark.parametrize("method", METHODS)
def test_an_embedding_is_refused_by_name(method: str) -> None:
    fields = {"feedforward_modules": ["q_proj"]} if method == "IA3" else {}
    for targets in BOTH:
        recipe = recipe_from({"peft_type": method, "target_modules": targets, **fields})
        with pytest.raises(AdapterError, match=REFUSED):
            recipe.bypasses_in(folded("llama2"), "llama")


@pytest.mark.parametrize(
    ("family", "targets", "refused"),
    [
        ("gpt2", r".*(c_attn|wpe)", "transformer.wpe, an embedding"),
        ("opt", r".*(q_proj|embed_positions)", "model.decoder.embed_positions, an embedding"),
    ],
)
def test_embeddings_of_positions(family: str, targets: str, refused: str) -> None:
    recipe = recipe_from({"peft_type": "LORA", "target_modules": targets})
    with pytest.raises(AdapterError, match=refused):
        recipe.bypasses_in(folded(family), family)


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": REGEX, "exclude_modules": ["embed_tokens"]},
        {"target_modules": REGEX, "exclude_modules": r".*embed.*"},
        {"target_modules": "all-linear"},
        {"target_modules": r".*(q_proj|lm_head)"},
        {},
    ],
)
def test_what_leaves_the_embedding_out_is_taken(fields: dict[str, Any]) -> None:
    recipe = recipe_from({"peft_type": "LORA", **fields})
    found = recipe.bypasses_in(folded("llama2"), "llama")
    assert any(path.endswith("q_proj") for path in found)
    assert "model.embed_tokens" not in found


@pytest.fixture(scope="module")
def executor() -> Executor:
    return compiler.compile(make_model(), {"there": peft.LoraConfig(target_modules=["q_proj"])})


def test_wherever_a_recipe_is_given(executor: Executor) -> None:
    config = peft.LoraConfig(target_modules=REGEX, use_dora=True)
    adapted = peft.get_peft_model(make_model(), config).base_model.model.model.embed_tokens
    assert isinstance(adapted, peft.tuners.lora.Embedding)  # so leaving it out is no option
    with pytest.raises(UnsupportedError, match=REFUSED):
        compiler.compile(make_model(), config)
    with pytest.raises(UnsupportedError, match=REFUSED):
        explain(BY_NAME["llama2"].config(2), peft=config, batch=1, seq=8)
    with pytest.raises(UnsupportedError, match=REFUSED):
        executor.add_adapter("new", config)
    for name in ("new", "there"):
        with pytest.raises(UnsupportedError, match=REFUSED):
            executor.finetune(DATA, name, peft=config, max_steps=1)
    assert list(executor.adapters) == ["there"]


FOR_EVER = r"(?:[\w.]|[\w.]{2})*\d"


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": FOR_EVER},
        {"target_modules": ["q_proj"], "exclude_modules": FOR_EVER},
        {"target_modules": ["q_proj"], "rank_pattern": {FOR_EVER: 4}},
        {
            "target_modules": ["q_proj"],
            "layers_to_transform": [0],
            "layers_pattern": [FOR_EVER],
        },
    ],
)
def test_a_regex_that_backtracks_for_ever_is_refused(fields: dict[str, Any]) -> None:
    """Others run meanwhile: another thread counts on."""
    counted, stops = [0], threading.Event()

    def count() -> None:
        while not stops.wait(0.001):
            counted[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    path = "model.layers.0.multi_head_self_attention.q_proj"  # minutes, without a limit
    try:
        recipe = recipe_from({"peft_type": "LORA", **fields})
        with pytest.raises(AdapterError, match="takes more than"):
            recipe.bypass(path)
    finally:
        stops.set()
        thread.join()
    assert counted[0] > 5


def test_a_regex_of_megabytes_is_refused() -> None:
    with pytest.raises(AdapterError, match="has 1000000 characters, and may have 10000"):
        recipe_from({"peft_type": "LORA", "target_modules": "q" * 10**6})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank_pattern": dict.fromkeys(map(str, range(16_385)), 4)}, "rank_pattern has 16385"),
        ({"alpha_pattern": {f"q|{i}": 1.0 for i in range(257)}}, "alpha_pattern has 257 regexes"),
        ({"layers_to_transform": list(range(10**6))}, "layers_to_transform has 1000000 entries"),
        ({"exclude_modules": ["x"] * 10**6}, "exclude_modules has 1000000 entries"),
    ],
)
def test_fields_that_take_minutes_to_match_are_refused(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(AdapterError, match=message):
        recipe_from({"peft_type": "LORA", "target_modules": ["q_proj"], **fields})


def test_a_plain_pattern_matches_as_the_regex_that_it_is() -> None:
    """As peft writes it; a dot is any character."""
    parts = ["a", "b", ".", "ab", "a.b", ".b", "b."]
    patterns = ["".join(some) for some in product(parts, repeat=2)]
    paths = [*patterns, "a.b.a.b", "x.aab", "xaab", "a", ""]
    for pattern, path in product([*parts, *patterns], paths):
        expected = re.match(rf"(.*\.)?({pattern})$", path) is not None
        assert matches_end(pattern, path) == expected, (pattern, path)


WORDS = {
    word: recipe
    for word, recipe in SHORTHANDS.items()
    if isinstance(recipe, TargetedRecipe) and recipe.target_modules is None
}
FAMILIES = {family for recipe in WORDS.values() for family in recipe.family_targets}


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=[] if name in ("falcon", "mixtral", "phi") else pytest.mark.slow)
        for name in CAUSAL_LMS
        if name in FAMILIES
    ],
)
def test_modules_that_are_usual_for_a_family_are_there(family: str) -> None:
    model = pipeline(Settings()).base(default_config(family)).model
    for word, recipe in WORDS.items():
        if family in recipe.family_targets:
            assert recipe.bypasses_in(model, family), word
