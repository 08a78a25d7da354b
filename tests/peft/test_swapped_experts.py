"""LoRA on parameters [E, in, out] without `is_transposed`, whose inputs peft takes for outputs."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from peft.optimizers import create_loraplus_optimizer
from safetensors.torch import load_file

import pcg
from pcg.errors import FinetuneError, UnsupportedError
from pcg.peft.adapter_files import WEIGHTS
from pcg.peft.lora import LoraConfig
from pcg.runtime.data.example import Example
from tests.support import compiled, oracle
from tests.support.architectures import IN_OUT, default_config
from tests.support.prompts import TOLERANCE, prompts

KINDS = pytest.mark.parametrize("kind", IN_OUT)


def base_of(kind: str) -> Any:
    return oracle.random_model(default_config(kind, 2))


def wrapped(base: Any, kind: str, **fields: Any) -> Any:
    fields = {"target_parameters": list(IN_OUT[kind]), **fields}
    config = peft.LoraConfig(r=3, lora_alpha=6, task_type="CAUSAL_LM", **fields)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of patterns, which peft applies to parameters
        model = peft.get_peft_model(copy.deepcopy(base), config).eval()
    generator = torch.Generator().manual_seed(2)
    for parameter in oracle.lora_parameters(model).values():
        parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


@KINDS
def test_files_are_pefts(kind: str, tmp_path: Path) -> None:
    """With ranks and scales of their own, which rsLoRA divides by √r."""
    base, (first, second) = base_of(kind), IN_OUT[kind]
    patterns = {"rank_pattern": {first: 2}, "alpha_pattern": {second: 5}}
    model = wrapped(base, kind, use_rslora=True, **patterns)
    oracle.save(model, tmp_path / "peft")
    executor = compiled.executor(base, {"mine": str(tmp_path / "peft")})
    executor.save_adapter("mine", tmp_path / "ours")
    oracle.check_same_weights(tmp_path / "peft", tmp_path / "ours")
    (sequence,) = prompts((9,))
    expected = oracle.logits(model, sequence)
    assert oracle.relative_error(executor.logits(sequence, "mine"), expected) < TOLERANCE
    again = oracle.load_saved(base, tmp_path / "ours")
    assert oracle.relative_error(oracle.logits(again, sequence), expected) < TOLERANCE


@pytest.mark.slow
@KINDS
def test_merged_weights_are_pefts(kind: str, tmp_path: Path) -> None:
    base = base_of(kind)
    model = wrapped(base, kind)
    oracle.save(model, tmp_path / "adapter")
    oracle.save_model(base, tmp_path / "base")
    pcg.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    of_peft = model.merge_and_unload().state_dict()
    for name, tensor in merged.state_dict().items():
        assert oracle.relative_error(tensor, of_peft[name]) < 1e-6


@KINDS
@pytest.mark.parametrize("init", [True, False, "gaussian"])
def test_a_fresh_adapter_starts_as_pefts(kind: str, init: bool | str, tmp_path: Path) -> None:
    base = base_of(kind)
    fields: dict[str, Any] = {"r": 8, "init_lora_weights": init}
    executor = compiled.executor(base)
    names = IN_OUT[kind]
    executor.add_adapter("new", LoraConfig(target_modules=(), target_parameters=names, **fields))
    executor.save_adapter("new", tmp_path)
    config = peft.LoraConfig(target_modules=[], target_parameters=list(names), **fields)
    oracle.save(peft.get_peft_model(copy.deepcopy(base), config), tmp_path / "peft")
    theirs, ours = (load_file(path / WEIGHTS) for path in (tmp_path / "peft", tmp_path))
    assert theirs.keys() == ours.keys()
    for key, tensor in theirs.items():
        assert ours[key].shape == tensor.shape
        assert float(ours[key].std()) == pytest.approx(float(tensor.std()), rel=0.15), key
        if init != "gaussian":
            assert float(ours[key].max()) == pytest.approx(float(tensor.max()), rel=0.05), key


@KINDS
def test_a_resumed_job_follows_peft_with_loraplus(kind: str, tmp_path: Path) -> None:
    """LoRA+ gives peft's B another rate: that of the inputs."""
    base, sequences = base_of(kind), prompts((8, 5))
    model = wrapped(base, kind)
    oracle.save(model, tmp_path / "start")
    optimizer = create_loraplus_optimizer(
        model, torch.optim.AdamW, lr=0.01, eps=1e-3, loraplus_lr_ratio=8.0
    )
    for _ in range(4):
        oracle.loss_and_gradients(model, sequences)
        optimizer.step()
    options: dict[str, Any] = {
        "batch_size": 2, "learning_rate": 0.01, "schedule": "constant", "eps": 1e-3,
        "max_grad_norm": None, "loraplus_lr_ratio": 8.0, "checkpoint_dir": tmp_path / "saved",
    }  # fmt: skip
    for steps in (2, 4):
        executor = compiled.executor(base, {"a": str(tmp_path / "start")})
        result = executor.finetune(
            [Example(s, s) for s in sequences], "a", max_steps=steps, **options
        )
    assert result.resumed_from == 2
    expected = oracle.in_own_dims(oracle.lora_parameters(model))
    found = executor.training_runner("a").parameters
    assert found.keys() == expected.keys()
    for path, tensor in found.items():
        assert oracle.relative_error(tensor, expected[path]) < 10 * TOLERANCE, path


def test_what_reads_a_and_b_otherwise_is_refused(tmp_path: Path) -> None:
    base = base_of("llama4_text")
    oracle.save_model(base, tmp_path / "base")
    oracle.save(wrapped(base, "llama4_text"), tmp_path / "adapter")
    executor = compiled.executor(base, {"a": str(tmp_path / "adapter")})
    sequence = prompts((8,))[0]
    with pytest.raises(FinetuneError, match=r"'muon' .* whose dims peft exchanges; use adamw"):
        executor.finetune([Example(sequence, sequence)], "a", max_steps=1, optimizer="muon")
    with pytest.raises(UnsupportedError, match="pcg combines LoRA on modules alone"):
        executor.combine_adapters("sum", ["a"], [1.0], "linear")
    with pytest.raises(UnsupportedError, match="pcg writes GGUF adapters of"):
        pcg.export(tmp_path / "base", tmp_path / "adapter", tmp_path / "a.gguf")
