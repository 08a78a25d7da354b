"""Every PEFT method against peft: logits and tokens of mixed batches, gradients, files."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file

import pcg
from pcg.errors import AdapterError
from pcg.ir.program.program import token_embedding
from pcg.keywords import field_docs
from pcg.peft.adapter_files import read_adapter
from pcg.peft.ia3 import IA3Config
from pcg.peft.lora import LoraConfig
from pcg.peft.recipe import Recipe
from pcg.peft.registry import RECIPES, SHORTHANDS, recipe_fields, recipe_of_fields
from pcg.runtime.data.example import Example
from tests.support import compiled, oracle
from tests.support.families import BY_NAME
from tests.support.parameters import mostly_slow
from tests.support.peft_cases import CONFIGS, Models, check_batch, check_gradients, wrap
from tests.support.prompts import LENGTHS, TOLERANCE, prompts

EACH = [(family, name) for family, configs in CONFIGS.items() for name in configs]
FEW = mostly_slow(
    EACH,
    *(("llama-biases", n) for n in ("biases", "dora-biases", "adalora-first", "vera", "p-tuning")),
)
"""Batches of all methods have the others."""


@pytest.mark.parametrize(
    "lengths",
    [LENGTHS, *(pytest.param((n,) * 5, marks=pytest.mark.slow) for n in (11, 1))],
    ids=["ragged", "equal", "one"],
)
@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("with_base", [True, False])
def test_logits_of_all_methods_in_one_batch(
    models: Mapping[str, Models], family: str, lengths: tuple[int, ...], with_base: bool
) -> None:
    case = models[family]
    names: list[str | None] = [*case.wrapped, *reversed(case.wrapped)]
    names += [None, *case.wrapped] if with_base else []
    sizes = [lengths[i % len(lengths)] for i in range(len(names))]
    sequences = prompts(sizes)
    found = case.executor.logits(sequences, names)
    for logits, sequence, name in zip(found, sequences, names, strict=True):
        expected = oracle.logits(case.model(name), sequence)
        assert oracle.relative_error(logits, expected) < TOLERANCE, name


@pytest.mark.parametrize("family", CONFIGS)
def test_greedy_tokens_of_all_methods_in_one_batch(
    models: Mapping[str, Models], family: str
) -> None:
    case = models[family]
    names = [*case.wrapped, None, *case.wrapped]
    sequences = prompts([4 + 3 * (i % 4) for i in range(len(names))])
    done = case.executor.generate(sequences, names, max_new_tokens=10, ignore_eos=True)
    for completion, sequence, name in zip(done, sequences, names, strict=True):
        assert list(completion.token_ids) == oracle.greedy(case.model(name), sequence, 10), name


def test_a_scaled_embedding_and_norms_with_an_offset_and_of_heads(tmp_path: Path) -> None:
    base = oracle.random_model(BY_NAME["gemma3"].config(1))
    targets = ["embed_tokens", "lm_head", "q_proj"]
    configs = {
        "lora": peft.LoraConfig(r=2, target_modules=targets, modules_to_save=["norm"]),
        "whole": peft.LoraConfig(r=2, target_modules=["v_proj"], modules_to_save=["embed_tokens"]),
    }
    wrapped = {name: wrap(base, config) for name, config in configs.items()}
    for name, model in wrapped.items():
        model.save_pretrained(tmp_path / name, save_embedding_layers=False)
    executor = compiled.executor(base, {name: str(tmp_path / name) for name in wrapped})
    embedding = token_embedding(executor.program.base.prologue)
    assert embedding is not None
    assert embedding.get("padding") == base.config.pad_token_id
    check_batch(executor, {None: base, **wrapped}, "lora")


def test_a_module_to_save_that_is_none_is_refused_at_once(tmp_path: Path) -> None:
    """Such an adapter would refuse every later program, in which its recipe is attached, too."""
    base = oracle.random_model(BY_NAME["llama3"].config(1))
    recipe = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["pooler"])
    wrap(base, recipe).save_pretrained(tmp_path, save_embedding_layers=False)
    executor = compiled.executor(base, {"a": LoraConfig(r=2, target_modules=["q_proj"])})
    for path_or_config in (recipe, tmp_path):
        with pytest.raises(AdapterError, match="modules_to_save has 'pooler'"):
            executor.add_adapter("b", path_or_config)
    executor.add_adapter("c", LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["norm"]))


@pytest.mark.parametrize(("family", "name"), FEW)
def test_each_alone(models: Mapping[str, Models], family: str, name: str) -> None:
    case = models[family]
    executor = compiled.executor(case.base, {name: str(case.saved / name)})
    sequences = prompts((9, 4))
    for logits, sequence in zip(executor.logits(sequences, name), sequences, strict=True):
        expected = oracle.logits(case.model(name), sequence)
        assert oracle.relative_error(logits, expected) < TOLERANCE


@pytest.mark.parametrize(("family", "name"), EACH)
def test_gradients_of_every_parameter(models: Mapping[str, Models], family: str, name: str) -> None:
    case = models[family]
    # More tokens than those from which another library runs the products (`_FEW_TOKENS`).
    check_gradients(case.executor, name, case.wrapped[name], (48, 30, 3))


@pytest.mark.parametrize(("family", "name"), EACH)
def test_peft_reads_what_we_save(
    models: Mapping[str, Models], family: str, name: str, tmp_path: Path
) -> None:
    case = models[family]
    case.executor.save_adapter(name, tmp_path / "ours")
    theirs, ours = case.saved / name, tmp_path / "ours"
    expected, found = (load_file(d / "adapter_model.safetensors") for d in (theirs, ours))
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key
    configs = [json.loads((d / "adapter_config.json").read_text()) for d in (theirs, ours)]
    for config in configs:  # peft writes a set, in any order
        for field in ("target_modules", "feedforward_modules"):
            if isinstance(config.get(field), list):
                config[field].sort()
    assert configs[0] == configs[1]
    (sequence,) = prompts((9,))
    both = [oracle.logits(oracle.load_saved(case.base, d), sequence) for d in (theirs, ours)]
    assert torch.equal(*both)
    again = read_adapter(ours, name)
    assert again.recipe == case.executor.adapters[name].recipe


@pytest.mark.parametrize(("family", "name"), FEW)
def test_a_new_adapter_changes_nothing_and_learns(
    models: Mapping[str, Models], family: str, name: str, tmp_path: Path
) -> None:
    case = models[family]
    executor = compiled.executor(case.base)
    config = CONFIGS[family][name]
    executor.add_adapter("new", config)
    (sequence,) = prompts((9,))
    fresh = executor.logits([sequence], "new")[0]
    if not executor.adapters["new"].prompt_tokens:  # random virtual tokens change something
        base = oracle.logits(case.base, sequence)
        assert oracle.relative_error(fresh, base) < TOLERANCE
    executor.save_adapter("new", tmp_path / "new")
    reread = oracle.load_saved(case.base, tmp_path / "new")
    assert oracle.relative_error(oracle.logits(reread, sequence), fresh) < TOLERANCE
    data = [Example(sequence, sequence)]
    result = executor.finetune(data, "new", max_steps=4, learning_rate=0.02, progress=False)
    assert result.losses[-1] < result.losses[0]
    executor.save_adapter("new", tmp_path / "tuned")
    tuned = oracle.load_saved(case.base, tmp_path / "tuned")
    found = executor.logits([sequence], "new")[0]
    assert oracle.relative_error(found, oracle.logits(tuned, sequence)) < TOLERANCE


@pytest.mark.parametrize("word", SHORTHANDS)
def test_recipes_survive_a_manifest(word: str) -> None:
    recipe = SHORTHANDS[word]
    fields: dict[str, Any] = json.loads(json.dumps(recipe_fields(recipe)))
    assert recipe_fields(recipe) == fields
    assert recipe_of_fields(fields) == recipe
    assert dataclasses.asdict(recipe_of_fields(fields)) == dataclasses.asdict(recipe)


def test_manifests_of_before_are_read() -> None:
    """All recipes once had fields that some have no more, under the names of LoRA's."""
    once = {"target_modules": None, "exclude_modules": None, "layers_to_transform": None}
    once |= {"layers_pattern": None, "bias": "none", "dropout": 0.0}
    lora = {**once, "rank": 4, "alpha": 8, "dropout": 0.1, "target_modules": ["q"]}
    found = recipe_of_fields({"peft_type": "LORA", **lora})
    assert found == LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q"])
    assert recipe_of_fields({"peft_type": "IA3", **once, "init": True}) == IA3Config()
    prompt = recipe_of_fields({"peft_type": "PROMPT_TUNING", **once, "tokens": 20})
    assert prompt == SHORTHANDS["prompt"]
    bitfit = recipe_of_fields({"peft_type": "BITFIT", **once, "bias": "all"})
    assert bitfit == SHORTHANDS["bitfit"]
    with pytest.raises(AdapterError, match="IA3 has no field 'dropout'"):
        recipe_of_fields({"peft_type": "IA3", **once, "dropout": 0.5})


@pytest.mark.parametrize("recipe", RECIPES.values())
def test_recipes_are_public_and_documented(recipe: type[Recipe]) -> None:
    assert getattr(pcg, recipe.__name__) is recipe
    assert field_docs(recipe).keys() == {field.name for field in dataclasses.fields(recipe)}


def test_recipes_are_read_without_what_is_heavy() -> None:
    code = (
        "import sys, pcg.peft.registry; "
        "heavy = 'torch', 'transformers', 'peft', 'triton', 'sympy'; "
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
