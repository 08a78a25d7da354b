"""Prefixes against peft: families, windows shorter than them, fresh ones, files that do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

import pcg
import pcg.compiler as compiler
from pcg.errors import AdapterError, GenerationError, UnsupportedError
from pcg.ir.program.folder import save_program
from pcg.peft.registry import recipe_from
from pcg.runtime.data.example import Example
from pcg.runtime.executor import Executor
from tests.support import oracle
from tests.support.families import BY_NAME
from tests.support.peft_cases import CAUSAL, check_batch, wrap
from tests.support.prompts import TOLERANCE, prompts

PREFIX = {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 4}
PROMPT = {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 6}
TOKENS = 12
"""More than a window of the families that have one."""
FAMILIES = ["gemma2", "gemma3", "bloom", "gptj", "gpt_bigcode", "mistral-window", "qwen2.5-windows"]


def pair(name: str, directory: Path) -> tuple[Any, Any, Executor]:
    """A base, peft's model of adapter `p`, and an executor that has it beside a prompt."""
    base = oracle.random_model(BY_NAME[name].config(3))
    wrapped = wrap(base, peft.PrefixTuningConfig(num_virtual_tokens=TOKENS, **CAUSAL))
    wrapped.save_pretrained(directory / "p")
    executor = compiler.compile(base, {"p": str(directory / "p")})
    executor.add_adapter("prompt", PROMPT)
    return base, wrapped, executor


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str, tmp_path: Path) -> None:
    base, wrapped, executor = pair(name, tmp_path)
    executor.save_adapter("prompt", tmp_path / "prompt")
    prompted = oracle.load_saved(base, tmp_path / "prompt")
    check_batch(executor, {"p": wrapped, None: base, "prompt": prompted}, "p")


def test_the_loss_is_pefts(tmp_path: Path) -> None:
    _, wrapped, executor = pair("llama3", tmp_path)
    (sequence,) = prompts((6,))
    found, count = executor.training_runner("p").evaluate([Example(sequence, sequence)])
    ids = torch.tensor([sequence])
    with torch.no_grad():
        assert found / count == pytest.approx(float(wrapped(ids, labels=ids).loss), rel=TOLERANCE)
    assert count == len(sequence) - 1


@pytest.mark.parametrize("init", [None, "zero"])
def test_a_fresh_prefix_is_read_by_peft(init: str | None, tmp_path: Path) -> None:
    """Grouped key heads, and a head size that the configuration names."""
    base = oracle.random_model(BY_NAME["qwen3"].config(2))
    executor = compiler.compile(base)
    adapter = executor.add_adapter("p", {**PREFIX, "init_weights": init})
    assert any(tensor.any() for tensor in adapter.tensors) == (init is None)
    (sequence,) = prompts((6,))
    data = [Example(sequence, sequence)]
    result = executor.finetune(data, "p", max_steps=4, learning_rate=0.1, progress=False)
    assert result.losses[-1] < result.losses[0]
    executor.save_adapter("p", tmp_path)
    theirs = oracle.load_saved(base, tmp_path)
    (found,) = executor.logits([sequence], "p")
    assert oracle.relative_error(found, oracle.logits(theirs, sequence)) < TOLERANCE


def test_a_prefix_takes_positions(tmp_path: Path) -> None:
    _, _, executor = pair("gpt2", tmp_path)  # 64 positions
    with pytest.raises(GenerationError, match="67 tokens, 12 of them its adapter's virtual ones"):
        executor.generate(prompts((55,)), "p", max_new_tokens=2)


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    _, _, executor = pair("llama3", tmp_path)
    file = tmp_path / "p" / "adapter_model.safetensors"
    (tensor,) = load_file(file).values()
    half = tensor.shape[1] // 2
    cases = [
        (tensor[:3].clone(), r"prompt_embeddings is \[3, .*\[12, 2 · 3 · features\]"),
        (tensor[:, :-1].clone(), r"\[12, 2 · 3 · features\]"),
        (tensor[:, :half].clone(), r"tensors .* for layers\.0"),
    ]
    for whole, message in cases:
        save_file({"prompt_embeddings": whole}, file)
        with pytest.raises(AdapterError, match=message):
            executor.add_adapter("other", tmp_path / "p")
    with pytest.raises(AdapterError, match="num_layers=7, and the base has 3 layers"):
        executor.add_adapter("other", {**PREFIX, "num_layers": 7})


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"num_virtual_tokens": None}, AdapterError, "num_virtual_tokens=None"),
        ({"num_transformer_submodules": 2}, AdapterError, "num_transformer_submodules=2"),
        ({"num_layers": 0}, AdapterError, "num_layers=0"),
        ({"init_weights": "ones"}, AdapterError, "init_weights='ones'"),
        ({"prefix_projection": 1}, AdapterError, "prefix_projection=1"),
        ({"encoder_hidden_size": 0}, AdapterError, "encoder_hidden_size=0"),
        ({"modules_to_save": ["lm_head"]}, UnsupportedError, "modules_to_save"),
    ],
)
def test_fields_refused_by_name(
    fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        recipe_from({**PREFIX, **fields})


def test_explain_counts_a_prefix_of_every_layer() -> None:
    config = BY_NAME["llama3"].config(3)
    report = pcg.explain(config, PREFIX, batch=1, seq=16)
    size = config["hidden_size"] // config["num_attention_heads"] * config["num_key_value_heads"]
    assert report.parameters["trainable"] == 4 * 3 * 2 * size
    assert report.peft == "prefix tuning with 4 virtual tokens"


def test_a_program_of_a_prefix_is_saved_and_loaded(tmp_path: Path) -> None:
    base = oracle.random_model(BY_NAME["llama3"].config(2))
    base.save_pretrained(tmp_path / "base")
    save_program(compiler.compile_program(tmp_path / "base", PREFIX), tmp_path / "program")
    executor = pcg.load(tmp_path / "program", weights=tmp_path / "base")
    executor.add_adapter("p", PREFIX)
    assert executor.training_runner("p").training is executor.program.training
    (sequence,) = prompts((6,))
    assert len(executor.generate([sequence], "p", max_new_tokens=3)[0].token_ids) == 3
