"""Prompts, prefixes and their encoders against peft: families, losses, positions, files."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

import pcg
import pcg.compiler as compiler
from pcg.errors import DataError, GenerationError, UnsupportedError
from pcg.ir.program.folder import save_program
from pcg.runtime.data.example import IGNORED, Example
from tests.support import compiled, oracle
from tests.support.families import BY_NAME
from tests.support.peft_cases import CAUSAL, check_batch, wrap
from tests.support.prompts import TOLERANCE, prompts

PROMPT = {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 5}
PREFIX = {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 4}
CONFIGS: dict[str, Any] = {
    "prompt": peft.PromptTuningConfig(num_virtual_tokens=5, **CAUSAL),
    # More tokens than a window of the families that have one.
    "prefix": peft.PrefixTuningConfig(num_virtual_tokens=12, **CAUSAL),
}
TUNED = {"max_steps": 4, "learning_rate": 0.1, "progress": False}
# Embeddings that are scaled within their module, behind it, normalised, or have positions added;
# windows, ALiBi, and layers of two kinds.
FAMILIES = ("gemma2", "gemma3", "granite", "bloom", "gptj", "gpt_bigcode", "mistral-window",
            "qwen2.5-windows", "falcon-7b")  # fmt: skip
FAST = (("prompt", "gemma2"), ("prompt", "bloom"), ("prefix", "gemma3"), ("prefix", "gpt_bigcode"))


def pair(kind: str, family: str, directory: Path, layers: int = 2) -> tuple[Any, Any, Any]:
    """A base, peft's model of adapter `p`, and an executor that has it beside the other kind."""
    base = oracle.random_model(BY_NAME[family].config(layers))
    models = {name: wrap(base, config) for name, config in CONFIGS.items()}
    for name, model in models.items():
        model.save_pretrained(directory / name)
    paths = {"p": str(directory / kind)}
    return base, models, compiled.executor(base, paths)


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        pytest.param(kind, family, marks=() if (kind, family) in FAST else pytest.mark.slow)
        for kind in CONFIGS
        for family in FAMILIES
        if (kind, family) not in (("prompt", "gpt_bigcode"), ("prefix", "falcon-7b"))
    ],
)
def test_families(kind: str, family: str, tmp_path: Path) -> None:
    base, models, executor = pair(kind, family, tmp_path, 3)
    other = "prefix" if kind == "prompt" else "prompt"
    executor.add_adapter("lora", {"peft_type": "LORA", "r": 4, "target_modules": "all-linear"})
    rows = {"p": models[kind], None: base, "lora": base}
    if kind == "prefix":
        executor.add_adapter(other, tmp_path / other)
        rows[other] = models[other]
        del rows["lora"]
    check_batch(executor, rows, "p")


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_loss_is_pefts(kind: str, tmp_path: Path) -> None:
    """The last token of a prompt predicts the first, unless its label says otherwise."""
    _, models, executor = pair(kind, "llama3", tmp_path)
    runner = executor.training_runner("p")
    (sequence,) = prompts((6,))
    first = kind == "prompt"
    for labels, count in ((sequence, 5 + first), ([IGNORED, *sequence[1:]], 5)):
        example = Example(sequence, labels)
        assert runner.count_targets([example]) == count
        loss = runner.forward_backward([example], count)
        with torch.no_grad():
            theirs = models[kind](torch.tensor([sequence]), labels=torch.tensor([labels])).loss
        assert loss / count == pytest.approx(float(theirs), rel=TOLERANCE)
        assert runner.evaluate([example]) == (pytest.approx(loss), count)


def test_prompts_of_several_lengths_stay_apart_from_the_base(tmp_path: Path) -> None:
    base, _, executor = pair("prompt", "llama3", tmp_path)
    wrapped = {}
    for tokens in (1, 9):
        config = peft.PromptTuningConfig(num_virtual_tokens=tokens, **CAUSAL)
        wrapped[f"p{tokens}"] = wrap(base, config, seed=tokens)
        wrapped[f"p{tokens}"].save_pretrained(tmp_path / f"p{tokens}")
        executor.add_adapter(f"p{tokens}", tmp_path / f"p{tokens}")
    sequences, names = prompts((7,) * 6), ["p9", None, "p1", "p1", None, "p9"]
    done = executor.generate(sequences, names, max_new_tokens=8, ignore_eos=True)
    for completion, sequence, name in zip(done, sequences, names, strict=True):
        model = base if name is None else wrapped[name]
        assert list(completion.token_ids) == oracle.greedy(model, sequence, 8)
        assert completion.prompt_tokens == len(sequence)


@pytest.mark.parametrize(("family", "recipe"), [("opt", PROMPT), ("llama3", PREFIX)])
def test_a_program_is_saved_and_loaded(family: str, recipe: Any, tmp_path: Path) -> None:
    base = oracle.random_model(BY_NAME[family].config(2))
    base.save_pretrained(tmp_path / "base")
    save_program(compiler.compile_program(tmp_path / "base", recipe), tmp_path / "program")
    executor = pcg.load(tmp_path / "program", weights=tmp_path / "base")
    executor.add_adapter("p", recipe)
    (sequence,) = prompts((6,))
    result = executor.finetune([Example(sequence, sequence)], "p", **TUNED)
    assert result.losses[-1] < result.losses[0]
    assert executor.training_runner("p").training is executor.program.training
    assert len(executor.generate([sequence], "p", max_new_tokens=3)[0].token_ids) == 3


@pytest.mark.parametrize("kind", CONFIGS)
def test_virtual_tokens_take_positions(kind: str, tmp_path: Path) -> None:
    _, _, executor = pair(kind, "gpt2", tmp_path)  # 64 positions
    tokens = CONFIGS[kind].num_virtual_tokens
    (sequence,) = prompts((60,))
    assert executor.generate([sequence], max_new_tokens=2, ignore_eos=True)
    words = f"{60 + tokens} tokens, {tokens} of them its adapter's virtual ones"
    with pytest.raises(GenerationError, match=words):
        executor.generate([sequence], "p", max_new_tokens=2)
    short = executor.generate([sequence[: 63 - tokens]], "p", max_new_tokens=9, ignore_eos=True)
    assert len(short[0].token_ids) == 1
    words = rf"data\[0\] has 60 tokens, .* {tokens} virtual .*max_length={64 - tokens}"
    with pytest.raises(DataError, match=words):
        executor.finetune([Example(sequence, sequence)], "p", progress=False)


@pytest.mark.parametrize("init", ["SAMPLE_VOCAB", "TEXT"])
def test_other_beginnings_are_read_and_not_made(init: str, tmp_path: Path) -> None:
    base = oracle.random_model(BY_NAME["llama3"].config(2))
    executor = compiled.executor(base)
    with pytest.raises(UnsupportedError, match=f"prompt_tuning_init='{init}'"):
        executor.add_adapter("new", {**PROMPT, "prompt_tuning_init": init})
    wrapped = wrap(base, peft.PromptTuningConfig(num_virtual_tokens=3, **CAUSAL))
    config = wrapped.peft_config["default"]
    config.prompt_tuning_init, config.prompt_tuning_init_text = init, "a text"
    config.tokenizer_name_or_path = "somewhere"
    wrapped.save_pretrained(tmp_path / "theirs")
    executor.add_adapter("p", tmp_path / "theirs")
    executor.save_adapter("p", tmp_path / "ours")
    texts = [(tmp_path / d / "adapter_config.json").read_text() for d in ("theirs", "ours")]
    assert texts[0].split() == texts[1].split()
    (sequence,) = prompts((6,))
    (found,) = executor.logits([sequence], "p")
    assert oracle.relative_error(found, oracle.logits(wrapped, sequence)) < TOLERANCE


@pytest.mark.parametrize("init", [None, "zero"])
def test_a_fresh_prefix_is_read_by_peft(init: str | None, tmp_path: Path) -> None:
    """Grouped key heads, and a head size that the configuration names."""
    base = oracle.random_model(BY_NAME["qwen3"].config(2))
    executor = compiled.executor(base)
    adapter = executor.add_adapter("p", {**PREFIX, "init_weights": init})
    assert any(tensor.any() for tensor in adapter.tensors) == (init is None)
    (sequence,) = prompts((6,))
    result = executor.finetune([Example(sequence, sequence)], "p", **TUNED)
    assert result.losses[-1] < result.losses[0]
    executor.save_adapter("p", tmp_path)
    theirs = oracle.load_saved(base, tmp_path)
    (found,) = executor.logits([sequence], "p")
    assert oracle.relative_error(found, oracle.logits(theirs, sequence)) < TOLERANCE


# ------------------------------------------------------------------------------------- encoders

LSTM = {"encoder_reparameterization_type": "LSTM", "encoder_hidden_size": 24}
ENCODERS = {
    "mlp": peft.PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=40, **CAUSAL),
    "lstm": peft.PromptEncoderConfig(num_virtual_tokens=4, **LSTM, **CAUSAL),
    "projection": peft.PrefixTuningConfig(num_virtual_tokens=3, prefix_projection=True, **CAUSAL),
}


@pytest.mark.parametrize("name", ENCODERS)
def test_a_fresh_encoder_is_as_in_peft(name: str) -> None:
    """Its parameters are named, shaped and spread alike."""
    base = oracle.random_model(BY_NAME["llama3"].config(2))
    ours = compiled.executor(base).add_adapter("p", ENCODERS[name])
    wrapped = peft.get_peft_model(base, copy.deepcopy(ENCODERS[name]))
    theirs = dict(wrapped.prompt_encoder["default"].state_dict())
    shapes = {key: value.shape for key, value in theirs.items()}
    assert {key: tensor.shape for key, tensor in ours.encoder.items()} == shapes
    for key, tensor in ours.encoder.items():
        if tensor.numel() > 500:
            assert float(tensor.std()) == pytest.approx(float(theirs[key].std()), rel=0.15), key


def test_a_zero_projection_begins_as_the_base_with_empty_keys() -> None:
    executor = compiled.executor(oracle.random_model(BY_NAME["llama3"].config(2)))
    fields = {**PREFIX, "prefix_projection": True, "init_weights": "zero"}
    adapter = executor.add_adapter("p", fields)
    assert not any(tensor.any() for w in adapter.weights.values() for tensor in w.tensors)
    assert adapter.encoder["embedding.weight"].any()


def test_dropout_of_encoders(tmp_path: Path) -> None:
    """peft's MLP has none either: its field is written back, and changes nothing."""
    base = oracle.random_model(BY_NAME["llama3"].config(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = dataclasses.replace(ENCODERS["mlp"], encoder_dropout=0.9)
    (sequence,) = prompts((6,))
    losses = []
    executor = compiled.executor(base)
    for name, one in (("with", config), ("without", ENCODERS["mlp"])):
        executor.add_adapter(name, one)
        runner = executor.training_runner(name)
        losses.append(runner.forward_backward([Example(sequence, sequence)], 6, dropout_seed=1))
    assert losses[0] == losses[1]
    with pytest.raises(UnsupportedError, match=r"encoder_dropout=0\.1"):
        executor.add_adapter("lstm", dataclasses.replace(ENCODERS["lstm"], encoder_dropout=0.1))
    executor.save_adapter("with", tmp_path)
    executor.add_adapter("saved", tmp_path)
    with pytest.raises(UnsupportedError, match="'saved' cannot be trained: P-tuning trains the en"):
        executor.training_runner("saved")
