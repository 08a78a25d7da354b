"""LoRA on experts and routers: peft's files, its targets, and what both refuse."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import save_file

import pcg
from pcg.errors import AdapterError
from pcg.peft.adapter_files import PREFIX, WEIGHTS, read_adapter, write_adapter
from pcg.peft.lora import LoraConfig
from tests.support import compiled, oracle
from tests.support.architectures import default_config
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
    oracle.check_same_weights(tmp_path / "peft", tmp_path / "ours")
    again = oracle.load_saved(base, tmp_path / "ours")
    (sequence,) = prompts((9,))
    executor = compiled.executor(base, {"mine": str(tmp_path / "ours")})
    found = executor.logits(sequence, "mine")
    assert oracle.relative_error(found, oracle.logits(again, sequence)) < TOLERANCE


@pytest.mark.parametrize("names", [["x_proj_weight", "dt_proj_weight"], ["dt_proj_weight"]])
def test_heads_of_zamba_are_adapted_as_experts(names: list[str], tmp_path: Path) -> None:
    """peft saves and merges such adapters, and cannot run them."""
    base = oracle.random_model(default_config("zamba"))
    model = wrapped(base, target_parameters=[f"mamba.{name}" for name in names])
    oracle.save(model, tmp_path / "peft")
    executor = compiled.executor(base, {"mine": str(tmp_path / "peft")})
    executor.save_adapter("mine", tmp_path / "ours")
    oracle.check_same_weights(tmp_path / "peft", tmp_path / "ours")
    (sequence,) = prompts((9,))
    expected = oracle.logits(model.merge_and_unload(), sequence)
    assert oracle.relative_error(executor.logits(sequence, "mine"), expected) < TOLERANCE


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
        (
            {"target_modules": ("experts",)},
            "parameters in target_parameters: experts.down_proj, ex",
        ),
        ({"target_modules": ("gate_proj", "q_proj")}, "gate and up of experts are one parameter"),
        ({"target_parameters": EXPERTS, "lora_dropout": 0.1}, "does not go with lora_dropout"),
        ({"target_parameters": EXPERTS, "use_dora": True}, "or use_dora; leave them out"),
        ({"target_parameters": "experts"}, "use a list of names"),
    ],
)
def test_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(AdapterError, match=message):
        pcg.explain(BY_NAME["qwen3_moe"].config(2), LoraConfig(**{"target_modules": (), **fields}))


def test_experts_in_one_matrix_are_refused() -> None:
    """peft's product is of DBRX's whole matrix [experts · out, in], with an A for all experts."""
    recipe = LoraConfig(r=2, target_modules=[], target_parameters=["mlp.w1"])
    with pytest.raises(AdapterError, match=r"'mlp.w1'.* each with a dim of the experts.*router"):
        pcg.explain(default_config("dbrx", 1), recipe)


@pytest.mark.parametrize("family", ["gpt_oss", "mixtral"])
def test_parameters_without_modules(family: str, tmp_path: Path) -> None:
    """As in peft, an adapter without target_modules adapts its parameters alone."""
    base = oracle.random_model(BY_NAME[family].config(2))
    recipe = peft.LoraConfig(r=2, target_parameters=EXPERTS[1:], task_type="CAUSAL_LM")
    model = peft.get_peft_model(copy.deepcopy(base), recipe)
    parameters = oracle.lora_parameters(model)
    for parameter in parameters.values():
        parameter.data.add_(0.1)
    oracle.save(model, tmp_path)
    executor = compiled.executor(base, {"theirs": str(tmp_path)})
    (sequence,) = prompts((9,))
    found = executor.logits(sequence, "theirs")
    assert oracle.relative_error(found, oracle.logits(model, sequence)) < TOLERANCE
    ours = executor.add_adapter("ours", LoraConfig(r=2, target_parameters=EXPERTS[1:]))
    assert {f"{path}.{kind}" for path in ours.weights for kind in ("lora_A", "lora_B")} == {
        *parameters
    }


def test_files_that_do_not_go_together(tmp_path: Path) -> None:
    base = oracle.random_model(BY_NAME["qwen3_moe"].config(2))
    oracle.save(wrapped(base, target_parameters=EXPERTS[1:]), tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(
        file.read_text().replace(f'"{EXPERTS[1]}"', ", ".join(f'"{e}"' for e in EXPERTS))
    )
    with pytest.raises(AdapterError, match=r"has weights for 1 parameters of .*experts"):
        read_adapter(tmp_path, "mine")


def test_modules_beside_parameters_without_target_modules(tmp_path: Path) -> None:
    base = oracle.random_model(BY_NAME["gpt_oss"].config(2))
    oracle.save(wrapped(base, ["q_proj"], EXPERTS), tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"target_modules": None}))
    with pytest.raises(AdapterError, match=r"has weights for .*q_proj, which .* does not target"):
        read_adapter(tmp_path, "mine")


def test_another_number_of_experts(tmp_path: Path) -> None:
    base = oracle.random_model(BY_NAME["qwen3_moe"].config(2))
    oracle.save(wrapped(base, target_parameters=EXPERTS), tmp_path)
    wider = oracle.random_model({**BY_NAME["qwen3_moe"].config(2), "num_experts": 8})
    with pytest.raises(AdapterError, match=r"ranks of 4 experts at .*down_proj, which has 8 in"):
        compiled.executor(wider, {"mine": str(tmp_path)})


SPELLINGS = {
    "qwen3_moe": ("mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    "mixtral": ("block_sparse_moe.experts", ("w1", "w3", "w2")),
    "glm4_moe": ("mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    "qwen2_moe": ("mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    "lfm2_moe": ("feed_forward.experts", ("w1", "w3", "w2")),
}
OF_PEFT = ("qwen3_moe", "mixtral")
"""Families whose files peft reads, too; of the others it leaves out dense layers or experts."""
RANK, SCALE = 3, 2.0


def save_by_expert(
    family: str, directory: Path, left_out: tuple[str, ...] = (), **fields: Any
) -> tuple[Any, Any]:
    """Write an adapter with a module for each expert; return the base and the merged model."""
    is_named = family in BY_NAME
    base = oracle.random_model(BY_NAME[family].config(2) if is_named else default_config(family))
    merged = copy.deepcopy(base)
    tensors: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(1)
    inside, parts = SPELLINGS[family]

    def add(path: str, weight: torch.Tensor) -> None:
        if any(word in path for word in left_out):
            return
        out, size = weight.shape
        a, b = (
            0.1 * torch.randn(*shape, generator=generator) for shape in ((RANK, size), (out, RANK))
        )
        tensors.update({f"{PREFIX}{path}.lora_A.weight": a, f"{PREFIX}{path}.lora_B.weight": b})
        weight.data.add_(SCALE * b @ a)

    for name, module in merged.named_modules():
        if name.endswith("experts") and hasattr(module, "gate_up_proj"):
            place = f"{name.rsplit('.', 2)[0]}.{inside}"
            for expert, (both, down) in enumerate(
                zip(module.gate_up_proj, module.down_proj, strict=True)
            ):
                for part, weight in zip(parts, (*both.chunk(2), down), strict=True):
                    add(f"{place}.{expert}.{part}", weight)
        elif name.endswith(("q_proj", *parts)):
            add(name, module.weight)
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / WEIGHTS)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK * SCALE, **fields}
    config = {"target_modules": ["q_proj", *parts], **config}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return base, merged


@pytest.mark.parametrize("targets", ["all-linear", r".*(q_proj|experts\.\d+\.\w+)"])
def test_experts_with_a_module_each_by_a_pattern(targets: str, tmp_path: Path) -> None:
    base, merged = save_by_expert("mixtral", tmp_path, target_modules=targets)
    executor = compiled.executor(base, {"mine": str(tmp_path)})
    (sequence,) = prompts((9,))
    found = executor.logits(sequence, "mine")
    assert oracle.relative_error(found, oracle.logits(merged, sequence)) < TOLERANCE


@pytest.mark.parametrize("family", SPELLINGS)
def test_experts_with_a_module_each(family: str, tmp_path: Path) -> None:
    """An expert or a part may be missing."""
    base, merged = save_by_expert(family, tmp_path / "whole")
    _, dense = save_by_expert(family, tmp_path / "dense", (".experts.",))
    _, partly = save_by_expert(
        family, tmp_path / "part", (".experts.1.", f".2.{SPELLINGS[family][1][1]}")
    )
    adapters = {name: str(tmp_path / name) for name in ("whole", "dense", "part")}
    executor = compiled.executor(base, adapters)
    (sequence,) = prompts((9,))
    for name, expected in (("whole", merged), ("dense", dense), ("part", partly), (None, base)):
        (found,) = executor.logits([sequence], name)
        assert oracle.relative_error(found, oracle.logits(expected, sequence)) < TOLERANCE
    if family in OF_PEFT:
        of_peft = oracle.load_saved(base, tmp_path / "whole")
        expected = oracle.logits(of_peft, sequence)
        (found,) = executor.logits([sequence], "whole")
        assert oracle.relative_error(found, expected) < TOLERANCE
    executor.save_adapter("part", tmp_path / "saved")
    again = compiled.executor(base, {"saved": str(tmp_path / "saved")})
    assert torch.equal(
        *(e.logits([sequence], n)[0] for e, n in ((executor, "part"), (again, "saved")))
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_rslora": True}, "use_rslora gives"),
        ({"r": 2}, "gives it rank 2"),
        (
            {"target_modules": ["q_proj", "gate_proj", "down_proj"]},
            "gate_proj.*name both|does not target",
        ),
    ],
)
def test_modules_of_experts_that_are_refused(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    base, _ = save_by_expert("qwen3_moe", tmp_path, **fields)
    with pytest.raises(AdapterError, match=message):
        compiled.executor(base, {"mine": str(tmp_path)})


def test_fused_keys_without_target_parameters(tmp_path: Path) -> None:
    """As vLLM reads them: peft's keys, of both parameters."""
    base = oracle.random_model(BY_NAME["qwen3_moe"].config(2))
    (sequence,) = prompts((9,))
    for name, parameters in (("both", EXPERTS), ("lone", EXPERTS[1:])):
        model = wrapped(base, ["q_proj"], parameters)
        oracle.save(model, tmp_path / name)
        file = tmp_path / name / "adapter_config.json"
        config = json.loads(file.read_text()) | {"target_parameters": None}
        config["target_modules"] = ["q_proj", "experts"]
        file.write_text(json.dumps(config))
        if name == "both":
            expected = oracle.logits(model, sequence)
    executor = compiled.executor(base, {"both": str(tmp_path / "both")})
    assert oracle.relative_error(executor.logits([sequence], "both")[0], expected) < TOLERANCE
    with pytest.raises(AdapterError, match="does not say which; name it"):
        executor.add_adapter("lone", str(tmp_path / "lone"))
