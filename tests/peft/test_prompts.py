"""Prompts against peft: where families put embeddings, losses, bounds, files that do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

import pcg
import pcg.compiler as compiler
from pcg.errors import AdapterError, DataError, GenerationError, UnsupportedError
from pcg.ir.program.folder import save_program
from pcg.peft.registry import recipe_from
from pcg.runtime.data.example import IGNORED, Example
from pcg.runtime.executor import Executor
from tests.support import oracle
from tests.support.families import BY_NAME
from tests.support.peft_cases import CAUSAL, check_batch, wrap
from tests.support.prompts import TOLERANCE, prompts

TOKENS = 5
PROMPT = {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": TOKENS}
LORA = {"peft_type": "LORA", "r": 4, "target_modules": "all-linear"}
# Embeddings that are scaled within their module, behind it, normalised, or have positions added;
# windows, ALiBi, and layers of two kinds.
FAMILIES = ["gemma2", "gemma3", "granite", "bloom", "gptj", "mistral-window", "falcon-7b"]


def pair(name: str, directory: Path, layers: int = 2) -> tuple[Any, Any, Executor]:
    """A base, peft's model of adapter `p`, and an executor that has it beside LoRA."""
    base = oracle.random_model(BY_NAME[name].config(layers))
    wrapped = wrap(base, peft.PromptTuningConfig(num_virtual_tokens=TOKENS, **CAUSAL))
    wrapped.save_pretrained(directory / "p")
    executor = compiler.compile(base, {"p": str(directory / "p")})
    executor.add_adapter("lora", LORA)
    return base, wrapped, executor


def embeddings(wrapped: Any) -> torch.nn.Parameter:
    return wrapped.prompt_encoder["default"].embedding.weight


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str, tmp_path: Path) -> None:
    base, wrapped, executor = pair(name, tmp_path, 3)
    check_batch(executor, {"p": wrapped, None: base, "lora": base}, "p")


def test_the_first_token_is_learned_as_peft_learns_it(tmp_path: Path) -> None:
    """The last virtual token predicts it, unless its label says otherwise."""
    _, wrapped, executor = pair("llama3", tmp_path)
    runner = executor.training_runner("p")
    (sequence,) = prompts((6,))
    for labels, count in ((sequence, 6), ([IGNORED, *sequence[1:]], 5)):
        example = Example(sequence, labels)
        assert runner.count_targets([example]) == count
        loss = runner.forward_backward([example], count)
        with torch.no_grad():
            theirs = wrapped(torch.tensor([sequence]), labels=torch.tensor([labels])).loss
        assert loss / count == pytest.approx(float(theirs), rel=TOLERANCE)
        assert runner.evaluate([example]) == (pytest.approx(loss), count)


def test_finetuning_follows_peft_step_by_step(tmp_path: Path) -> None:
    _, wrapped, executor = pair("gpt2", tmp_path)
    sequences = prompts((8, 5))
    optimizer = torch.optim.AdamW([embeddings(wrapped)], lr=0.05, weight_decay=0.0)
    for _ in range(3):
        oracle.loss_and_gradients(wrapped, sequences)
        optimizer.step()
    executor.finetune(
        [Example(s, s) for s in sequences],
        "p",
        max_steps=3,
        batch_size=2,
        learning_rate=0.05,
        schedule="constant",
        max_grad_norm=None,
        progress=False,
    )
    ours = executor.adapters["p"].tensors[0]
    assert (ours - embeddings(wrapped)).norm() / ours.norm() < 1e-4
    (found,) = executor.logits(sequences[:1], "p")
    assert oracle.relative_error(found, oracle.logits(wrapped, sequences[0])) < 1e-4


def test_prompts_of_several_lengths_stay_apart_from_the_base(tmp_path: Path) -> None:
    base, _, executor = pair("llama3", tmp_path)
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


def test_a_program_of_a_prompt_is_saved_and_loaded(tmp_path: Path) -> None:
    base = oracle.random_model(BY_NAME["opt"].config(2))
    base.save_pretrained(tmp_path / "base")
    program = compiler.compile_program(tmp_path / "base", PROMPT)
    save_program(program, tmp_path / "program")
    executor = pcg.load(tmp_path / "program", weights=tmp_path / "base")
    executor.add_adapter("p", PROMPT)
    (sequence,) = prompts((6,))
    options = {"max_steps": 3, "learning_rate": 0.1, "progress": False}
    result = executor.finetune([Example(sequence, sequence)], "p", **options)
    assert result.losses[-1] < result.losses[0]
    assert executor.training_runner("p").training is executor.program.training


def test_half_precision_takes_a_prompt_in_its_own_dtype() -> None:
    base = oracle.random_model(BY_NAME["llama3"].config(2), torch.bfloat16)
    executor = compiler.compile(base)
    adapter = executor.add_adapter("p", PROMPT)
    assert adapter.tensors[0].dtype == torch.float32
    (sequence,) = prompts((6,))
    runner = executor.training_runner("p")
    runner.forward_backward([Example(sequence, sequence)], 6)
    (parameter,) = runner.parameters.values()
    assert parameter.grad.dtype == torch.float32
    assert executor.logits([sequence], "p")[0].dtype == torch.bfloat16


def test_virtual_tokens_take_positions() -> None:
    base = oracle.random_model(BY_NAME["gpt2"].config(2))  # 64 positions
    executor = compiler.compile(base)
    executor.add_adapter("p", PROMPT)
    (sequence,) = prompts((60,))
    assert executor.generate([sequence], max_new_tokens=2, ignore_eos=True)
    with pytest.raises(GenerationError, match="65 tokens, 5 of them its adapter's virtual ones"):
        executor.generate([sequence], "p", max_new_tokens=2)
    short = executor.generate([sequence[:58]], "p", max_new_tokens=9, ignore_eos=True)
    assert len(short[0].token_ids) == 1
    with pytest.raises(DataError, match=r"data\[0\] has 60 tokens, .* 5 virtual .*max_length=59"):
        executor.finetune([Example(sequence, sequence)], "p", progress=False)


@pytest.mark.parametrize("init", ["SAMPLE_VOCAB", "TEXT"])
def test_other_beginnings_are_read_and_not_made(init: str, tmp_path: Path) -> None:
    base = oracle.random_model(BY_NAME["llama3"].config(2))
    executor = compiler.compile(base)
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


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    _, _, executor = pair("llama3", tmp_path)
    file = tmp_path / "p" / "adapter_model.safetensors"
    (tensor,) = load_file(file).values()
    cases = [
        ({"prompt_embeddings": tensor[:3].clone()}, r"prompt_embeddings is \[3, 64\], .*\[5, hid"),
        ({"prompt_embeddings": tensor[:, :8].clone()}, r"\[5, 8\] for the token embedding"),
        ({"prompt": tensor}, "prompt, which is no prompt tuning weight"),
        ({}, "holds no prompt tuning weights"),
    ]
    for tensors, message in cases:
        save_file(tensors, file)
        with pytest.raises(AdapterError, match=message):
            executor.add_adapter("other", tmp_path / "p")


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"num_virtual_tokens": None}, AdapterError, "num_virtual_tokens=None"),
        ({"num_virtual_tokens": 0}, AdapterError, "num_virtual_tokens=0"),
        ({"num_transformer_submodules": 2}, AdapterError, "num_transformer_submodules=2"),
        ({"prompt_tuning_init": "ZERO"}, AdapterError, "prompt_tuning_init='ZERO'"),
        ({"modules_to_save": ["lm_head"]}, UnsupportedError, "modules_to_save"),
        ({"r": 8}, UnsupportedError, "r=8, a field it does not know"),
        ({"task_type": "SEQ_CLS"}, UnsupportedError, "SEQ_CLS"),
    ],
)
def test_fields_refused_by_name(
    fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        recipe_from({**PROMPT, **fields})


def test_explain_counts_a_prompt() -> None:
    config = BY_NAME["llama3"].config(2)
    report = pcg.explain(config, PROMPT, batch=1, seq=16)
    assert report.parameters["trainable"] == TOKENS * config["hidden_size"]
    assert report.peft == "prompt tuning with 5 virtual tokens"
