"""LoHa's own: which operators it adds, how it begins, what a step keeps, and what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.utils import constants
from safetensors.torch import load_file, save_file

import pcg
import pcg.compiler as compiler
from pcg.errors import AdapterError, UnsupportedError
from pcg.ir.analysis.verifier import verify
from pcg.ir.parser import parse_graph
from pcg.ir.printer import print_graph
from pcg.passes.attach import Bypasses, attach
from pcg.passes.registry import run_graphs
from pcg.peft.loha import LohaBypass, LoHaConfig
from pcg.peft.lora import LoraBypass
from pcg.peft.registry import recipe_from
from pcg.runtime.data.example import Example
from tests.support import oracle
from tests.support.families import BY_NAME
from tests.support.mlp import inner_plan, mlp_model
from tests.support.peft_cases import check_batch, trained, wrap
from tests.support.prompts import prompts

DOWN = "model.layers.{layer}.down"
FIELDS: dict[str, Any] = {"r": 3, "alpha": 5, "target_modules": ["q_proj", "down_proj"]}
DICT = {"peft_type": "LOHA", **FIELDS}
JOB: dict[str, Any] = {"batch_size": 1, "max_steps": 3, "learning_rate": 0.02, "progress": False}


def saved(directory: Path, **fields: Any) -> tuple[Any, Any]:
    """A base, and peft's model with an adapter that does something, which is saved."""
    base = oracle.random_model(BY_NAME["llama-biases"].config(2))
    wrapped = wrap(base, peft.LoHaConfig(**{**FIELDS, **fields}))
    oracle.save(wrapped, directory)
    return base, wrapped


def test_defaults_of_families_are_pefts() -> None:
    theirs = constants.TRANSFORMERS_MODELS_TO_LOHA_TARGET_MODULES_MAPPING
    ours = LoHaConfig.family_targets
    assert all(theirs[family] == list(names) for family, names in ours.items())


def test_config_fields_are_pefts() -> None:
    theirs = {**peft.LoHaConfig(inference_mode=True).to_dict(), "peft_type": "LOHA"}
    ours = LoHaConfig().config_fields(None, "", {})
    assert {**ours, "peft_version": theirs["peft_version"]} == theirs


def test_training_makes_a_product_of_rank_r2_beside_the_module() -> None:
    (block,) = attach(mlp_model(), Bypasses({DOWN: (LohaBypass(2, 1.0),)})).blocks
    verify(block)
    after = """
graph @block_0(%x: f32[T, 4]) {
  frozen %norm.weight: f32[4] = "model.layers.{layer}.norm.weight"
  frozen %up.weight: f32[6, 4] = "model.layers.{layer}.up.weight"
  frozen %down.weight: f32[4, 6] = "model.layers.{layer}.down.weight"
  frozen %down.bias: f32[4] = "model.layers.{layer}.down.bias"
  adapter %down.hada_w1_b: f32[2, 6] = "model.layers.{layer}.down.hada_w1_b"
  adapter %down.hada_w2_b: f32[2, 6] = "model.layers.{layer}.down.hada_w2_b"
  adapter %down.hada_w1_a: f32[4, 2] = "model.layers.{layer}.down.hada_w1_a"
  adapter %down.hada_w2_a: f32[4, 2] = "model.layers.{layer}.down.hada_w2_a"
  %norm: f32[T, 4] = rms_norm(%x, %norm.weight) {eps=1e-06, offset=0.0, round_first=True}  @norm
  %up: f32[T, 6] = linear(%norm, %up.weight)  @up
  %relu: f32[T, 6] = relu(%up)
  %down: f32[T, 4] = linear(%relu, %down.weight, %down.bias)  @down
  %down_loha_down: f32[4, 6] = khatri_rao(%down.hada_w1_b, %down.hada_w2_b) {dim=-2}  @down
  %down_loha_up: f32[4, 4] = khatri_rao(%down.hada_w1_a, %down.hada_w2_a) {dim=-1}  @down
  %down_loha_s: f32[T, 4] = shrink(%relu, %down_loha_down)  @down
  %down_loha_z: f32[T, 4] = expand_add(%down, %down_loha_s, %down_loha_up)  @down
  %add: f32[T, 4] = add(%x, %down_loha_z)
  return %add
}
"""
    assert print_graph(block) == print_graph(parse_graph(after))


def test_serving_has_one_lora_in_its_place() -> None:
    both = Bypasses({DOWN: (LoraBypass(4), LohaBypass(2, 1.0))})
    attached = attach(mlp_model(), both.for_serving())
    (block,) = run_graphs(attached.blocks, "fuse_linears,fuse_lora")
    assert [node.op for node in block.nodes] == ["rms_norm", "linear", "relu", "lora_linear", "add"]


def test_what_is_made_of_weights_is_made_again_for_backward() -> None:
    plan = inner_plan(attach(mlp_model(), Bypasses({DOWN: (LohaBypass(2, 1.0),)})))
    assert not {"down_loha_down", "down_loha_up"} & set(plan.saved)


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "falcon-7b"])
def test_mixed_logits_tokens_and_gradients(family: str, tmp_path: Path) -> None:
    """With patterns of ranks and alphas, at all linear modules, beside LoRA and the base."""
    base = oracle.random_model(BY_NAME[family].config(2))
    first = "query_key_value" if family == "falcon-7b" else "q_proj"
    patterns = {"rank_pattern": {first: 2}, "alpha_pattern": {rf".*\.1\..*{first}": 3}}
    configs = {
        "loha": peft.LoHaConfig(r=4, target_modules="all-linear", **patterns),
        "lora": peft.LoraConfig(r=5, target_modules="all-linear"),
    }
    wrapped = {name: wrap(base, config) for name, config in configs.items()}
    for name, model in wrapped.items():
        oracle.save(model, tmp_path / name)
    executor = compiler.compile(base, {name: str(tmp_path / name) for name in wrapped})
    check_batch(executor, {**wrapped, None: base}, "loha")


def test_programs_for_triton(tmp_path: Path) -> None:
    """Serving reads rows as LoRA's, and training multiplies by what torch makes of the factors."""
    base, wrapped = saved(tmp_path / "loha")
    lora = wrap(base, peft.LoraConfig(r=5, target_modules=["q_proj", "up_proj"]))
    oracle.save(lora, tmp_path / "lora")
    paths = {name: str(tmp_path / name) for name in ("loha", "lora")}
    executor = compiler.compile(base, paths, backend="triton")
    check_batch(executor, {"loha": wrapped, "lora": lora, None: base}, "loha")


def test_gpt2_which_peft_does_not_adapt(tmp_path: Path) -> None:
    """Against LoRA of the same products: a file for pcg, which peft refuses."""
    base = oracle.random_model(BY_NAME["gpt2"].config(2))
    with pytest.raises(TypeError, match="Conv1D"):
        peft.get_peft_model(copy.deepcopy(base), peft.LoHaConfig(target_modules=["c_attn"]))
    executor = compiler.compile(base)
    fields = {**DICT, "target_modules": ["c_attn"], "init_weights": False}
    loha = executor.add_adapter("loha", fields)
    lora = {"peft_type": "LORA", "r": 9, "lora_alpha": 9, "target_modules": ["c_attn"]}
    same = executor.add_adapter("lora", lora)
    for path, weights in loha.weights.items():
        delta = (weights.w1_a @ weights.w1_b) * (weights.w2_a @ weights.w2_b) * weights.scale
        u, s, v = torch.linalg.svd(delta, full_matrices=False)
        same.weights[path].a.copy_(v[:9])
        same.weights[path].b.copy_(u[:, :9] * s[:9])
    executor.refresh_adapter("lora")
    (sequence,) = prompts((9,))
    ours, theirs = executor.logits([sequence, sequence], ["loha", "lora"])
    assert oracle.relative_error(ours, theirs) < 1e-4


@pytest.mark.parametrize("init", [True, False])
def test_a_fresh_adapter_is_as_in_peft(init: bool) -> None:
    base = oracle.random_model(BY_NAME["llama3"].config(2))
    executor = compiler.compile(base)
    fields = {**DICT, "r": 16, "init_weights": init}
    adapter = executor.add_adapter("a", fields)
    config = peft.LoHaConfig(**{k: v for k, v in fields.items() if k != "peft_type"})
    theirs = trained(peft.get_peft_model(copy.deepcopy(base), config))
    for path, parameter in theirs.items():
        ours, largest = adapter.parameter(path).weight, float(parameter.detach().abs().max())
        assert ours.shape == parameter.shape
        assert float(ours.abs().max()) == pytest.approx(largest, rel=0.05)
        assert float(ours.std()) == pytest.approx(float(parameter.detach().std()), rel=0.1)


def test_a_resumed_job_ends_with_the_same_bits(tmp_path: Path) -> None:
    base = oracle.random_model(BY_NAME["llama3"].config(2))
    data = [Example(s, s) for s in prompts((9, 12, 5))]
    options = {**JOB, "schedule": "constant"}
    whole = compiler.compile(base)
    result = whole.finetune(data, "a", peft=DICT, **options)
    for steps in (1, 3):
        parts = compiler.compile(base)
        last = parts.finetune(
            data, "a", peft=DICT, checkpoint_dir=tmp_path, **{**options, "max_steps": steps}
        )
    assert last.resumed_from == 1
    assert last.losses == result.losses
    for path, weights in whole.adapters["a"].weights.items():
        assert all(map(torch.equal, weights.tensors, parts.adapters["a"].weights[path].tensors))


def test_explain_counts_what_peft_trains() -> None:
    config = BY_NAME["llama3"].config(2)
    wrapped = peft.get_peft_model(oracle.random_model(config), peft.LoHaConfig(**FIELDS))
    count = sum(p.numel() for p in trained(wrapped).values())
    report = pcg.explain(config, DICT, batch=1, seq=16)
    assert report.peft == "LoHa r3 on q_proj, down_proj"
    assert report.parameters["trainable"] == count
    # In fp32: the factors, their gradients, and AdamW's two moments and a step of each.
    assert report.memory_bytes["adapters"] == report.memory_bytes["gradients"] == 4 * count
    assert report.memory_bytes["optimizer"] == 8 * count + 4 * 4 * 4
    assert {"eager", "compressed"} <= {stage.stage for stage in report.activations}


def test_dropout_is_kept_in_files_and_refused_in_training(tmp_path: Path) -> None:
    base, wrapped = saved(tmp_path / "theirs", rank_dropout=0.25, module_dropout=0.5)
    executor = compiler.compile(base, {"a": str(tmp_path / "theirs")})
    (sequence,) = prompts((9,))
    expected = oracle.logits(wrapped, sequence)
    assert oracle.relative_error(executor.logits([sequence], "a")[0], expected) < 1e-5
    executor.save_adapter("a", tmp_path / "ours")
    config = json.loads((tmp_path / "ours" / "adapter_config.json").read_text())
    assert (config["rank_dropout"], config["module_dropout"]) == (0.25, 0.5)
    data = [Example(sequence, sequence)]
    with pytest.raises(UnsupportedError, match=r"rank_dropout=0\.25: pcg trains LoHa without"):
        executor.finetune(data, "a", **JOB)
    with pytest.raises(UnsupportedError, match=r"module_dropout=1: pcg trains LoHa without"):
        executor.finetune(data, "b", peft={**DICT, "module_dropout": 1}, **JOB)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"r": 0}, AdapterError, "r=0"),
        ({"alpha": "8"}, AdapterError, "alpha='8'"),
        ({"rank_pattern": {"q_proj": 0}}, AdapterError, r"rank_pattern\['q_proj'\]=0"),
        ({"rank_dropout": 2.0}, AdapterError, "rank_dropout=2"),
        ({"init_weights": "gaussian"}, AdapterError, "init_weights='gaussian'"),
        ({"modules_to_save": ["lm_head"]}, UnsupportedError, "modules_to_save"),
        ({"bias": "all"}, UnsupportedError, "bias='all', a field it does not know"),
    ],
)
def test_fields_refused_by_name(
    fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        recipe_from({**DICT, **fields})


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    base, _ = saved(tmp_path)
    executor = compiler.compile(base)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    key = next(key for key in tensors if key.endswith("q_proj.hada_w2_b"))
    smaller = {k: v[:2] if k.endswith("_b") else v[:, :2] for k, v in tensors.items()}
    narrow = {k: v[:, :30] if k.endswith("_b") else v for k, v in tensors.items()}
    damages = {
        "the partner of another": {k: v for k, v in tensors.items() if k != key},
        r"\[2, 64\]; expected \[64, 3\], \[3, 64\], \[64, 3\], \[3, 64\]": {
            **tensors,
            key: tensors[key][:2],
        },
        "has LoHa of rank 2 .* gives it LoHa of rank 3": smaller,
        r"\[3, 30\] for .*, which is \[64, 96\]": narrow,
    }
    for message, damaged in damages.items():
        save_file({k: v.clone() for k, v in damaged.items()}, file)
        with pytest.raises(AdapterError, match=message):
            executor.add_adapter("damaged", tmp_path)
