"""(IA)³'s own: the defaults of every family, which modules are scaled where, what is refused."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
from peft.utils import constants
from safetensors.torch import load_file, save_file

import pcg.compiler as compiler
from pcg.errors import AdapterError, UnsupportedError
from pcg.ir.printer import print_graph
from pcg.passes.attach import Bypasses, attach
from pcg.passes.registry import run_graphs
from pcg.peft.ia3 import FAMILY_FEEDFORWARD, FAMILY_TARGETS, Ia3Bypass, IA3Config
from pcg.peft.lora import LoraBypass
from pcg.peft.registry import recipe_from
from pcg.peft.targets import FAMILY_TARGETS as LORA_TARGETS
from tests.support import oracle
from tests.support.bypasses import lora
from tests.support.families import BY_NAME
from tests.support.mlp import mlp_model
from tests.support.peft_cases import make_models, wrap
from tests.support.prompts import TOLERANCE, prompts

IA3, IN = Ia3Bypass(False), Ia3Bypass(True)
UP, DOWN = "model.layers.{layer}.up", "model.layers.{layer}.down"


def test_defaults_of_families_are_pefts() -> None:
    theirs = constants.TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING
    inputs = constants.TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING
    experts = {"w2"}  # parameters of transformers 5, and no linear modules
    for ours, usual in ((FAMILY_TARGETS, theirs), (FAMILY_FEEDFORWARD, inputs)):
        assert {family: list(names) for family, names in ours.items()} == {
            family: [name for name in usual[family] if name not in experts]
            for family in theirs
            if family in LORA_TARGETS
        }


def test_a_feedforward_name_matches_the_end_of_any_path_as_in_peft() -> None:
    recipe = IA3Config(target_modules=("q_proj", "up_proj"), feedforward_modules=("p_proj",))
    assert recipe.bypasses(("a.q_proj", "a.up_proj")) == {
        "a.q_proj": Ia3Bypass(False),
        "a.up_proj": Ia3Bypass(True),
    }


def test_what_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="modules_to_save"):
        recipe_from(peft.IA3Config(modules_to_save=["lm_head"]))
    with pytest.raises(AdapterError, match=r"feedforward_modules has 'down'.*did you mean"):
        IA3Config(target_modules=("downs",), feedforward_modules=("down",)).bypasses(("a.downs",))
    with pytest.raises(AdapterError, match=r"feedforward_modules='.*_proj', a regex for the whole"):
        IA3Config(target_modules=("q",), feedforward_modules=r".*_proj").bypasses(("a.q",))
    with pytest.raises(AdapterError, match=r"target_modules is not given.*'mystery'"):
        IA3Config().bypasses(("a.q",), model_type="mystery")
    with pytest.raises(AdapterError, match=r"feedforward_modules is not given.*'mystery'"):
        IA3Config(target_modules=("q",)).bypasses(("a.q",), model_type="mystery")
    with pytest.raises(AdapterError, match="not a regex"):
        IA3Config(feedforward_modules="(")
    with pytest.raises(AdapterError, match="init_ia3_weights=1"):
        IA3Config(init_ia3_weights=1)  # type: ignore[arg-type]


def test_attached_as_text() -> None:
    bypasses = Bypasses({UP: (IA3,), DOWN: (IN,)})
    (block,) = attach(mlp_model(), bypasses).blocks
    text = print_graph(block)
    assert "%up_scaled: f32[T, 6] = scale(%up, %up.ia3_l)  @up" in text
    assert "%down_scaled_x: f32[T, 6] = scale(%relu, %down.ia3_l_in)  @down" in text
    assert "linear(%down_scaled_x, %down.weight, %down.bias)" in text


def test_lora_stays_fused_where_other_methods_meet_it() -> None:
    """And serves LoRA alone without a call more."""
    both = Bypasses({UP: (LoraBypass(None), IA3), DOWN: (LoraBypass(None), IN)})
    (block,) = run_graphs(attach(mlp_model(), both).blocks, "fuse_linears,fuse_lora")
    assert [node.op for node in block.nodes] == [
        "rms_norm", "lora_linear", "scale", "relu", "scale", "lora_linear", "add",
    ]  # fmt: skip
    attached = attach(mlp_model(), lora({UP: None, DOWN: None}))
    (block,) = run_graphs(attached.blocks, "fuse_linears,fuse_lora")
    assert [node.op for node in block.nodes] == [
        "rms_norm", "lora_linear", "relu", "lora_linear", "add",
    ]  # fmt: skip


def test_random_vectors() -> None:
    base = oracle.random_model(BY_NAME["llama3"].config(2))
    executor = compiler.compile(base)
    executor.add_adapter("a", {"peft_type": "IA3", "init_ia3_weights": False})
    values = torch.cat([tensor.flatten() for tensor in executor.adapters["a"].tensors])
    assert values.mean() == pytest.approx(0.0, abs=0.2)
    assert values.std() == pytest.approx(1.0, abs=0.2)


def test_paths_for_all_linear_that_peft_cannot_read_itself(tmp_path: Path) -> None:
    base = oracle.random_model(BY_NAME["llama3"].config(2))
    config = peft.IA3Config(target_modules="all-linear", feedforward_modules=["down_proj"])
    wrapped = wrap(base, config)
    oracle.save(wrapped, tmp_path / "theirs")
    with pytest.raises(ValueError, match="should be a subset"):
        oracle.load_saved(base, tmp_path / "theirs")
    executor = compiler.compile(base, {"a": str(tmp_path / "theirs")})
    executor.save_adapter("a", tmp_path / "ours")
    (sequence,) = prompts((9,))
    expected = oracle.logits(wrapped, sequence)
    assert oracle.relative_error(executor.logits([sequence], "a")[0], expected) < TOLERANCE
    assert torch.equal(
        oracle.logits(oracle.load_saved(base, tmp_path / "ours"), sequence), expected
    )


def test_damaged_vectors(tmp_path: Path) -> None:
    models = make_models("opt", tmp_path)
    file = tmp_path / "ia3" / "adapter_model.safetensors"
    tensors = load_file(file)
    key = next(key for key in tensors if "fc2" in key)
    save_file({**tensors, key: tensors[key].reshape(-1, 1)}, file)
    with pytest.raises(AdapterError, match=r"fc2 has ia3_l \[96, 1\]; expected \[1, in\]"):
        models.executor.add_adapter("damaged", tmp_path / "ia3")
    save_file({**tensors, key: tensors[key][:, :5].contiguous()}, file)
    with pytest.raises(AdapterError, match=r"tensors \[5\] for .*fc2, which is \[64, 96\]"):
        models.executor.add_adapter("damaged", tmp_path / "ia3")
    save_file({**tensors, key.replace("ia3_l", "lora_A.weight"): tensors[key] + 1}, file)
    with pytest.raises(AdapterError, match=r"no \(IA\)³ weight"):
        models.executor.add_adapter("damaged", tmp_path / "ia3")


def test_half_precision_scales_in_fp32() -> None:
    base = oracle.random_model(BY_NAME["llama3"].config(2), torch.bfloat16)
    wrapped = wrap(base, peft.IA3Config())
    executor = compiler.compile(base)
    adapter = executor.add_adapter("a", {"peft_type": "IA3"})
    for path, weights in adapter.weights.items():
        own = wrapped.base_model.model.get_submodule(path).ia3_l["default"]
        weights.tensors[0].copy_(own.data.flatten())
    executor.refresh_adapter("a")
    sequences = prompts((9, 5))
    for logits, sequence in zip(executor.logits(sequences, "a"), sequences, strict=True):
        expected = oracle.logits(wrapped, sequence).float()
        assert oracle.relative_error(logits.float(), expected) < 0.03
