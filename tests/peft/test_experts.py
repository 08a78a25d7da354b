"""LoRA on experts and routers: peft's files, its targets, and what both refuse."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file

import pcg
from pcg.errors import AdapterError
from pcg.peft.adapter_files import WEIGHTS, read_adapter, write_adapter
from pcg.peft.lora import LoraConfig
from tests.support import compiled, oracle
from tests.support.families import BY_NAME
from tests.support.prompts import TOLERANCE, prompts

EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def wrapped(base: Any, target_modules: Any = (), target_parameters: Any = ()) -> Any:
    """A copy of the model in peft, whose adapter does something."""
    return oracle.with_adapter(base, target_modules, rank=3, parameters=target_parameters)


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": "all-linear"},
        {"target_modules": ["k_proj"], "target_parameters": EXPERTS},
        {"target_parameters": EXPERTS[:1]},
        {"target_parameters": EXPERTS[1:]},
        {"target_modules": ["gate_proj", "up_proj", "q_proj"]},
    ],
    ids=str,
)
def test_files_are_pefts(fields: dict[str, Any], tmp_path: Path) -> None:
    base = oracle.random_model(BY_NAME["qwen3_moe"].config(2))
    oracle.save(wrapped(base, **fields), tmp_path / "peft")
    adapter = read_adapter(tmp_path / "peft", "mine")
    write_adapter(adapter, tmp_path / "ours")
    theirs, ours = (load_file(tmp_path / name / WEIGHTS) for name in ("peft", "ours"))
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[key], ours[key]) for key in theirs)
    again = oracle.load_saved(base, tmp_path / "ours")
    (sequence,) = prompts((9,))
    executor = compiled.executor(base, {"mine": str(tmp_path / "ours")})
    found = executor.logits(sequence, "mine")
    assert oracle.relative_error(found, oracle.logits(again, sequence)) < TOLERANCE


def test_adapters_of_several_ranks_in_one_batch(tmp_path: Path) -> None:
    """Ranks of 1 to 5, some with a single parameter; peft runs one at a time."""
    base = oracle.random_model(BY_NAME["mixtral"].config(2))
    models = {
        f"r{rank}": oracle.with_adapter(
            base, ["q_proj"][: rank % 2], rank=rank, parameters=EXPERTS[rank % 2 :], seed=rank
        )
        for rank in range(1, 6)
    }
    for name, model in models.items():
        oracle.save(model, tmp_path / name)
    executor = compiled.executor(base, {name: str(tmp_path / name) for name in models})
    names = [*models, None, *reversed(models)]
    sequences = prompts(range(2, 2 + len(names)))
    for name, sequence, found in zip(
        names, sequences, executor.logits(sequences, names), strict=True
    ):
        expected = oracle.logits(models[name] if name else base, sequence)
        assert oracle.relative_error(found, expected) < TOLERANCE


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "glm4_moe", "gpt_oss"])
def test_a_fresh_adapter_adapts_what_pefts_does(name: str) -> None:
    config = BY_NAME[name].config(2)
    base = oracle.random_model(config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of patterns, which peft applies to parameters
        model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules="all-linear"))
    expected = {key: tuple(t.shape) for key, t in oracle.lora_parameters(model).items()}
    executor = compiled.executor(oracle.random_model(config))
    adapter = executor.add_adapter("new", LoraConfig(r=2, target_modules="all-linear"))
    assert {
        f"{path}.{suffix.removesuffix('.weight')}": tuple(tensor.shape)
        for path, weights in adapter.weights.items()
        for suffix, tensor in weights.stored.items()
    } == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"target_parameters": ("experts.gate_proj",)}, "target_parameters has 'experts.gate_pr"),
        ({"target_modules": ("gate_proj", "q_proj")}, "gate and up of experts are one parameter"),
        ({"target_parameters": EXPERTS, "lora_dropout": 0.1}, "does not go with lora_dropout"),
        ({"target_parameters": EXPERTS, "use_dora": True}, "or use_dora; leave them out"),
        ({"target_parameters": "experts"}, "use a list of names"),
    ],
)
def test_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(AdapterError, match=message):
        pcg.explain(BY_NAME["qwen3_moe"].config(2), LoraConfig(**{"target_modules": (), **fields}))


def test_files_that_do_not_go_together(tmp_path: Path) -> None:
    base = oracle.random_model(BY_NAME["qwen3_moe"].config(2))
    oracle.save(wrapped(base, target_parameters=EXPERTS[1:]), tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(
        file.read_text().replace(f'"{EXPERTS[1]}"', ", ".join(f'"{e}"' for e in EXPERTS))
    )
    with pytest.raises(AdapterError, match=r"has weights for 1 parameters of .*experts"):
        read_adapter(tmp_path, "mine")
