"""Encoders of prompts and prefixes against peft: training step by step, checkpoints, counts."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file

import pcg.compiler as compiler
from pcg.errors import AdapterError, FinetuneError, UnsupportedError
from pcg.explain import explain as explaining
from pcg.peft.prompt_encoder import PromptEncoder
from pcg.peft.registry import recipe_from
from pcg.runtime.data.example import Example
from pcg.runtime.executor import Executor
from tests.support import oracle
from tests.support.families import BY_NAME
from tests.support.peft_cases import CAUSAL, give_encoder, trained
from tests.support.prompts import TOLERANCE, prompts

LSTM = {"encoder_reparameterization_type": "LSTM", "encoder_hidden_size": 24}
CONFIGS = {
    "mlp": peft.PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=40, **CAUSAL),
    "lstm": peft.PromptEncoderConfig(num_virtual_tokens=4, **LSTM, **CAUSAL),
    "projection": peft.PrefixTuningConfig(num_virtual_tokens=3, prefix_projection=True, **CAUSAL),
}
OPTIONS: dict[str, Any] = {
    "batch_size": 1,
    "learning_rate": 0.01,
    "schedule": "constant",
    "progress": False,
}


def pair(name: str, family: str, directory: Path) -> tuple[Any, Any, Executor]:
    """A base, peft's fresh model of it, and an executor with the same encoder in adapter `p`."""
    base = oracle.random_model(BY_NAME[family].config(2))
    torch.manual_seed(0)
    wrapped = peft.get_peft_model(copy.deepcopy(base), copy.deepcopy(CONFIGS[name])).eval()
    wrapped.save_pretrained(directory / "p")
    executor = compiler.compile(base, {"p": str(directory / "p")})
    give_encoder(executor, "p", wrapped)
    return base, wrapped, executor


@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
@pytest.mark.parametrize("name", CONFIGS)
def test_finetuning_follows_peft_step_by_step(name: str, family: str, tmp_path: Path) -> None:
    base, wrapped, executor = pair(name, family, tmp_path)
    sequences = prompts((8, 5))
    # Of AdamW's, the first steps move by the gradient's sign, which rounding decides near zero.
    options = {**OPTIONS, "batch_size": 2, "eps": 1e-3, "max_grad_norm": None}
    parameters = [*trained(wrapped).values()]
    optimizer = torch.optim.AdamW(parameters, lr=0.01, eps=1e-3, weight_decay=0.0)
    losses = []
    for _ in range(4):
        loss, _ = oracle.loss_and_gradients(wrapped, sequences)
        losses.append(loss)
        optimizer.step()
    data = [Example(s, s) for s in sequences]
    result = executor.finetune(data, "p", max_steps=4, **options)
    targets = executor.training_runner("p").count_targets(data)
    assert [loss * targets for loss in result.losses] == pytest.approx(losses, rel=TOLERANCE)
    executor.save_adapter("p", tmp_path / "ours")
    (ours,) = load_file(tmp_path / "ours" / "adapter_model.safetensors").values()
    theirs = wrapped.get_prompt_embedding_to_save("default")
    assert (ours - theirs).norm() / theirs.norm() < TOLERANCE
    (found,) = executor.logits(sequences[:1], "p")
    for model in (wrapped, oracle.load_saved(base, tmp_path / "ours")):
        assert oracle.relative_error(found, oracle.logits(model, sequences[0])) < TOLERANCE


@pytest.mark.parametrize("name", CONFIGS)
def test_a_resumed_job_ends_with_the_same_bits(name: str, tmp_path: Path) -> None:
    base = oracle.random_model(BY_NAME["llama3"].config(2))
    data = [Example(s, s) for s in prompts((9, 12, 5))]
    options = {**OPTIONS, "eval_data": data[:1], "restore_best": True}
    whole, parts = compiler.compile(base), compiler.compile(base)
    result = whole.finetune(data, "p", peft=CONFIGS[name], max_steps=5, **options)
    for steps in (3, 5):
        parts = compiler.compile(base)
        last = parts.finetune(
            data, "p", peft=CONFIGS[name], max_steps=steps, checkpoint_dir=tmp_path, **options
        )
    assert last.resumed_from == 3
    assert (last.losses, last.eval_losses) == (result.losses, result.eval_losses)
    one, other = (executor.adapters["p"].tensors for executor in (whole, parts))
    assert len(one) > 2
    assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_fresh_encoder_is_as_in_peft(name: str) -> None:
    """Its parameters are named, shaped, spread and counted alike."""
    config = BY_NAME["llama3"].config(2)
    base = oracle.random_model(config)
    executor = compiler.compile(base)
    ours = executor.add_adapter("p", CONFIGS[name])
    theirs = dict(
        peft.get_peft_model(base, copy.deepcopy(CONFIGS[name]))
        .prompt_encoder["default"]
        .state_dict()
    )
    assert {key: tensor.shape for key, tensor in ours.encoder.items()} == {
        key: value.shape for key, value in theirs.items()
    }
    for key, tensor in ours.encoder.items():
        if tensor.numel() > 500:
            assert float(tensor.std()) == pytest.approx(float(theirs[key].std()), rel=0.15), key
    report = explaining.explain(config, CONFIGS[name], batch=1, seq=16)
    assert report.parameters["trainable"] == sum(p.numel() for p in theirs.values())


def test_a_zero_projection_begins_as_the_base_with_empty_keys() -> None:
    base = oracle.random_model(BY_NAME["llama3"].config(2))
    executor = compiler.compile(base)
    fields = {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 3, "prefix_projection": True}
    adapter = executor.add_adapter("p", {**fields, "init_weights": "zero"})
    assert not any(tensor.any() for w in adapter.weights.values() for tensor in w.tensors)
    assert adapter.encoder["embedding.weight"].any()


def test_what_is_refused(tmp_path: Path) -> None:
    _base, _, executor = pair("lstm", "llama3", tmp_path)
    executor.add_adapter("saved", tmp_path / "p")
    with pytest.raises(UnsupportedError, match="'saved' cannot be trained: P-tuning trains the en"):
        executor.training_runner("saved")
    fields = {"peft_type": "P_TUNING", "num_virtual_tokens": 3, **LSTM}
    with pytest.raises(UnsupportedError, match=r"encoder_dropout=0\.1"):
        executor.add_adapter("other", {**fields, "encoder_dropout": 0.1})
    for field, value in (
        ("encoder_reparameterization_type", "GRU"),
        ("encoder_hidden_size", 0),
        ("encoder_num_layers", True),
        ("encoder_dropout", 2.0),
    ):
        with pytest.raises(AdapterError, match=f"{field}={value!r}"):
            recipe_from({**fields, field: value})
    with pytest.raises(AdapterError, match="prefix_projection=True makes keys and values of 8"):
        PromptEncoder("PREFIX", 3).widths([(4, 8)])


def test_a_checkpoint_of_another_encoder(tmp_path: Path) -> None:
    base = oracle.random_model(BY_NAME["llama3"].config(2))
    data = [Example(s, s) for s in prompts((9,))]
    options = {**OPTIONS, "checkpoint_dir": tmp_path, "max_steps": 1}
    compiler.compile(base).finetune(data, "p", peft=CONFIGS["mlp"], **options)
    other = dataclasses.replace(CONFIGS["mlp"], encoder_hidden_size=8)
    with pytest.raises(FinetuneError, match=r"the encoder MLP with 40 features .* with 8 features"):
        compiler.compile(base).finetune(data, "p", peft=other, **options)
    (checkpoint,) = tmp_path.glob("step-*")
    (checkpoint / "encoder.safetensors").unlink()
    with pytest.raises(FinetuneError, match=r"encoder\.safetensors cannot be read"):
        compiler.compile(base).finetune(data, "p", peft=CONFIGS["mlp"], **options)


def test_an_mlp_has_no_dropout_in_peft_either() -> None:
    """What its field says is written back, and changes nothing."""
    base = oracle.random_model(BY_NAME["llama3"].config(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = dataclasses.replace(CONFIGS["mlp"], encoder_dropout=0.9)
    (sequence,) = prompts((6,))
    losses = []
    for one in (config, CONFIGS["mlp"]):
        executor = compiler.compile(base)
        executor.add_adapter("p", one)
        runner = executor.training_runner("p")
        losses.append(runner.forward_backward([Example(sequence, sequence)], 6, dropout_seed=1))
    assert losses[0] == losses[1]
