"""AdaLoRA against peft: the orthogonal loss, whole schedules, pruned files, resumed jobs."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from pcg.errors import AdapterError, FinetuneError
from pcg.peft.adapter import Adapter
from pcg.runtime.data.example import Example
from tests.support import compiled, oracle
from tests.support.adalora import DICT, FIELDS, OPTIONS, pair, train_peft
from tests.support.families import BY_NAME
from tests.support.parameters import mostly_slow
from tests.support.peft_cases import trained
from tests.support.prompts import TOLERANCE, prompts


def assert_same(one: Adapter, other: Adapter) -> None:
    """The same bits at the same modules."""
    assert one.weights.keys() == other.weights.keys()
    for path, weights in one.weights.items():
        assert all(map(torch.equal, weights.tensors, other.weights[path].tensors)), path


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tinit": 0, "tfinal": 0, "deltaT": 1, "beta1": 0.6, "beta2": 0.3},
        {"init_r": 3, "target_r": 1, "orth_reg_weight": 2.0, "tfinal": 1, "deltaT": 5},
    ],
    ids=["warm", "cold", "sparse"],
)
def test_a_whole_schedule_is_pefts(fields: dict[str, Any], tmp_path: Path) -> None:
    base, wrapped, executor = pair(tmp_path, **fields)
    sequences = prompts((9, 14, 6))
    losses = train_peft(wrapped, sequences, 12)
    data = [Example(s, s) for s in sequences]
    result = executor.finetune(data, "a", max_steps=12, shuffle=False, **OPTIONS)
    assert list(result.losses) == pytest.approx(losses, rel=1e-4)
    oracle.save(wrapped, tmp_path / "theirs")
    executor.save_adapter("a", tmp_path / "ours")
    configs = [
        json.loads((tmp_path / d / "adapter_config.json").read_text()) for d in ("theirs", "ours")
    ]
    for config in configs:
        config["target_modules"].sort()
    assert configs[0] == configs[1]
    kept = [sum(which) for which in configs[0]["rank_pattern"].values()]
    assert sum(kept) == {**FIELDS, **fields}["target_r"] * len(kept)
    assert len(set(kept)) > 1
    theirs, ours = (
        load_file(tmp_path / d / "adapter_model.safetensors") for d in ("theirs", "ours")
    )
    assert {k: t.shape for k, t in theirs.items()} == {k: t.shape for k, t in ours.items()}
    for key, tensor in theirs.items():
        assert (ours[key] - tensor).abs().max() < 1e-4 if tensor.numel() else True, key
    (found,) = executor.logits(sequences[:1], "a")
    for model in (wrapped, oracle.load_saved(base, tmp_path / "ours")):
        assert oracle.relative_error(found, oracle.logits(model, sequences[0])) < 1e-4


def test_the_orthogonal_loss_and_its_gradients_are_pefts(tmp_path: Path) -> None:
    _, wrapped, executor = pair(tmp_path)
    (sequence,) = prompts((11,))
    ids = torch.tensor([sequence])
    out = wrapped(ids, labels=ids)
    out.loss.backward()
    runner = executor.training_runner("a")
    loss = runner.forward_backward([Example(sequence, sequence)], 10) / 10
    beside = runner.adapter.recipe.training_beside(runner.shards, 12)
    assert beside is not None
    assert loss + beside.regularize() == pytest.approx(float(out.loss.detach()), rel=TOLERANCE)
    theirs = trained(wrapped)
    assert runner.parameters.keys() == theirs.keys()
    for path, parameter in runner.parameters.items():
        error = (parameter.grad - theirs[path].grad).norm() / theirs[path].grad.norm()
        assert error < TOLERANCE, path


@pytest.mark.parametrize("module", mostly_slow(["model.layers.0.self_attn.q_proj", ""], ""))
def test_pruned_adapters_are_read_served_and_saved(module: str, tmp_path: Path) -> None:
    """One module with no triplet left, or all with some, in a batch with LoRA and the base."""
    base, wrapped, executor = pair(tmp_path)
    names = [name for name, _ in wrapped.base_model.model.named_parameters() if "lora_E" in name]
    pattern = {
        name: [not (module and name.startswith(module)) and i != index % 4 for i in range(4)]
        for index, name in enumerate(names)
    }
    wrapped.base_model.rankallocator.mask_using_rank_pattern(wrapped.base_model.model, pattern)
    wrapped.peft_config["default"].rank_pattern = dict(pattern)
    oracle.save(wrapped, tmp_path / "pruned")
    pruned = oracle.load_saved(base, tmp_path / "pruned")
    executor.add_adapter("pruned", tmp_path / "pruned")
    lora = oracle.with_adapter(base, ["q_proj", "up_proj"], rank=3)
    oracle.save(lora, tmp_path / "lora")
    executor.add_adapter("lora", tmp_path / "lora")
    models = {"pruned": pruned, None: base, "lora": lora, "a": None}
    sequences = prompts((9, 4, 7, 5))
    found = executor.logits(sequences, [*models])
    for logits, sequence, model in zip(found, sequences, models.values(), strict=True):
        if model is not None:
            assert oracle.relative_error(logits, oracle.logits(model, sequence)) < TOLERANCE
    (alone,) = compiled.executor(base, {"p": str(tmp_path / "pruned")}).logits(sequences[:1], "p")
    assert oracle.relative_error(alone, oracle.logits(pruned, sequences[0])) < TOLERANCE
    executor.save_adapter("pruned", tmp_path / "again")
    first, second = (
        load_file(tmp_path / d / "adapter_model.safetensors") for d in ("pruned", "again")
    )
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    again = oracle.load_saved(base, tmp_path / "again")
    assert torch.equal(oracle.logits(again, sequences[0]), oracle.logits(pruned, sequences[0]))
    data = [Example(s, s) for s in sequences[:3]]
    theirs = oracle.load_saved(base, tmp_path / "pruned", is_trainable=True)
    losses = train_peft(theirs, sequences[:3], 4, allocates=False)
    options = {**OPTIONS, "max_steps": 4, "shuffle": False}
    result = executor.finetune(data, "further", peft=tmp_path / "pruned", **options)
    assert list(result.losses) == pytest.approx(losses, rel=1e-4)
    oracle.save(theirs, tmp_path / "theirs")
    executor.save_adapter("further", tmp_path / "ours")
    configs = [
        json.loads((tmp_path / d / "adapter_config.json").read_text()) for d in ("pruned", "ours")
    ]
    assert configs[0]["rank_pattern"] == configs[1]["rank_pattern"]
    second, third = (
        load_file(tmp_path / d / "adapter_model.safetensors") for d in ("theirs", "ours")
    )
    for key, tensor in second.items():
        assert (third[key] - tensor).abs().max() < 1e-4 if tensor.numel() else True, key


def test_a_schedule_without_steps_is_the_jobs(tmp_path: Path) -> None:
    """Also of a job that is resumed, whose checkpoint names them."""
    base = oracle.random_model(BY_NAME["llama3"].config(2))
    data = [Example(s, s) for s in prompts((9, 12))]
    recipe = {name: value for name, value in DICT.items() if name != "total_step"}
    named, open_ = compiled.executor(base), compiled.executor(base)
    named.finetune(data, "a", peft=DICT, max_steps=12, **OPTIONS)
    options = {**OPTIONS, "max_steps": 12, "checkpoint_dir": tmp_path, "save_every": 4}
    open_.finetune(data, "a", peft=recipe, **options)
    assert_same(named.adapters["a"], open_.adapters["a"])
    assert open_.adapters["a"].recipe.total_step == 12
    again = compiled.executor(base)
    assert again.finetune(data, "a", peft=recipe, **options).resumed_from == 12
    assert_same(named.adapters["a"], again.adapters["a"])
    with pytest.raises(FinetuneError, match=r"beta1=0\.85 and peft= 0\.5"):
        compiled.executor(base).finetune(data, "a", peft={**recipe, "beta1": 0.5}, **options)


def test_a_fresh_adapter_is_as_in_peft(tmp_path: Path) -> None:
    base = oracle.random_model(BY_NAME["llama3"].config(2))
    executor = compiled.executor(base)
    for init in (True, False):
        fields = {**DICT, "init_lora_weights": init, "init_r": 40}
        adapter = executor.add_adapter(str(init), fields)
        config = peft.AdaLoraConfig(**{**FIELDS, "init_lora_weights": init, "init_r": 40})
        theirs = trained(peft.get_peft_model(copy.deepcopy(base), config))
        for path, parameter in theirs.items():
            ours = adapter.parameter(path).weight
            assert ours.shape == parameter.shape
            spread = float(parameter.detach().std())
            assert float(ours.std()) == pytest.approx(
                spread, rel=0.5 if ours.shape[1] == 1 else 0.1
            )
    unscheduled = {name: value for name, value in DICT.items() if name != "total_step"}
    executor.add_adapter("b", unscheduled)
    executor.save_adapter("b", tmp_path)
    assert peft.AdaLoraConfig.from_pretrained(tmp_path).total_step == 6


def test_what_does_not_fit(tmp_path: Path) -> None:
    _, _, executor = pair(tmp_path)
    file = tmp_path / "start" / "adapter_model.safetensors"
    tensors = load_file(file)
    key = next(key for key in tensors if key.endswith("lora_E"))
    damages = {
        "the partner of another": {k: v for k, v in tensors.items() if k != key},
        r"\[3, 1\]; expected": {**tensors, key: tensors[key][:3].clone()},
        r"\[4\]; expected": {**tensors, key: tensors[key][:, 0].clone()},
    }
    for message, damaged in damages.items():
        save_file(damaged, file)
        with pytest.raises(AdapterError, match=message):
            executor.add_adapter("damaged", tmp_path / "start")
    data = [Example(s, s) for s in prompts((9,))]
    with pytest.raises(FinetuneError, match="target_r=9 is above init_r=4"):
        executor.finetune(data, "b", peft={**DICT, "target_r": 9}, **OPTIONS)
