"""VeRA's own: what is shared, what training keeps, and what is refused."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
from peft.utils import constants
from safetensors.torch import load_file, save_file

import pcg.compiler as compiler
from pcg.errors import AdapterError, UnsupportedError
from pcg.passes.attach import Bypasses, attach
from pcg.passes.registry import run_graphs
from pcg.peft.registry import recipe_from
from pcg.peft.vera import VeraBypass, VeraConfig
from pcg.runtime.data.example import Example
from tests.support import oracle
from tests.support.bypasses import lora
from tests.support.families import BY_NAME
from tests.support.mlp import inner_plan, mlp_model
from tests.support.peft_cases import wrap
from tests.support.prompts import TOLERANCE, prompts

VERA = (VeraBypass(2),)
UP, DOWN = "model.layers.{layer}.up", "model.layers.{layer}.down"
FIELDS = {"peft_type": "VERA", "r": 4, "target_modules": ["q_proj", "down_proj"]}


def test_defaults_of_families_are_pefts() -> None:
    theirs = constants.TRANSFORMERS_MODELS_TO_VERA_TARGET_MODULES_MAPPING
    assert all(theirs[family] == list(names) for family, names in VeraConfig.family_targets.items())


def test_the_matrices_are_as_large_as_the_largest_site() -> None:
    (block,) = attach(mlp_model(), Bypasses({UP: VERA, DOWN: VERA})).blocks
    types = {p.source: str(p.type) for p in block.parameters if p.role == "adapter"}
    assert types == {
        "vera_A": "f32[2, 6]",
        "vera_B": "f32[6, 2]",
        f"{UP}.vera_lambda_b": "f32[6]",
        f"{UP}.vera_lambda_d": "f32[2]",
        f"{DOWN}.vera_lambda_b": "f32[4]",
        f"{DOWN}.vera_lambda_d": "f32[2]",
    }


def test_serving_has_lora_in_its_place() -> None:
    attached = attach(mlp_model(), Bypasses({DOWN: VERA}).for_serving())
    (block,) = run_graphs(attached.blocks, "fuse_linears,fuse_lora")
    assert [node.op for node in block.nodes] == ["rms_norm", "linear", "relu", "lora_linear", "add"]


def test_no_input_is_kept_for_matrices_that_are_not_trained() -> None:
    """LoRA keeps A's input for A's gradient; VeRA keeps A's result alone."""
    plan = inner_plan(attach(mlp_model(), Bypasses({DOWN: VERA})))
    assert "down_vera_s" in plan.saved
    plain = inner_plan(attach(mlp_model(), lora({DOWN: 2})))
    assert set(plain.saved) - set(plan.saved) == {"down_s"}
    assert {name.rpartition(".")[2] for name in plan.trained} == {"vera_lambda_b", "vera_lambda_d"}


def test_dropout() -> None:
    """A drops as LoRA's does; all dropped is the base."""
    base = oracle.random_model(BY_NAME["llama3"].config(2))
    executor = compiler.compile(base)
    executor.add_adapter("a", {**FIELDS, "vera_dropout": 1.0, "init_weights": False})
    (sequence,) = prompts((14,))
    runner = executor.training_runner("a")
    loss = runner.forward_backward([Example(sequence, sequence)], 13, dropout_seed=5)
    logits = executor.logits([sequence])[0]
    expected = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(sequence[1:]))
    assert loss / 13 == pytest.approx(float(expected), rel=TOLERANCE)
    assert all(not p.grad.any() for path, p in runner.parameters.items() if path.endswith("_d"))


@pytest.mark.parametrize("init", [True, False])
def test_a_fresh_adapter_is_as_in_peft(init: bool) -> None:
    base = oracle.random_model(BY_NAME["llama3"].config(2))
    executor = compiler.compile(base)
    fields = {**FIELDS, "projection_prng_key": 3, "init_weights": init, "d_initial": 0.3}
    adapter = executor.add_adapter("a", fields)
    config = peft.VeraConfig(**{k: v for k, v in fields.items() if k != "peft_type"})
    theirs = peft.get_peft_model(base, config)
    assert torch.equal(adapter.shared["vera_A"], theirs.base_model.vera_A["default"])
    assert torch.equal(adapter.shared["vera_B"], theirs.base_model.vera_B["default"])
    for path, weights in adapter.weights.items():
        module = theirs.base_model.model.get_submodule(path)
        lambda_b, lambda_d = weights.tensors
        assert torch.equal(lambda_b, module.vera_lambda_b["default"])
        assert not init or torch.equal(lambda_d, module.vera_lambda_d["default"])


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="modules_to_save"):
        recipe_from({**FIELDS, "modules_to_save": ["lm_head"]})
    for field, value in (
        ("r", 0),
        ("projection_prng_key", -1),
        ("d_initial", "x"),
        ("init_weights", 1),
    ):
        with pytest.raises(AdapterError, match=f"{field}={value!r}"):
            VeraConfig(**{field: value})
    base = oracle.random_model(BY_NAME["llama3"].config(2))
    config = peft.VeraConfig(r=4, target_modules=["q_proj", "down_proj"])
    oracle.save(wrap(base, config), tmp_path)
    executor = compiler.compile(base)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    key = next(key for key in tensors if key.endswith("vera_lambda_d"))
    damages = {
        "nothing of vera_A, vera_B": {k: v for k, v in tensors.items() if "vera_A" not in k
                                      and "vera_B" not in k},
        "vera_B of vera_A, vera_B": {k: v for k, v in tensors.items() if "vera_A" not in k},
        "the partner of another": {k: v for k, v in tensors.items() if k != key},
        "VeRA of rank 3, and its": {**tensors, key: tensors[key][:3].clone()},
        r"\[4, 1\]; expected": {**tensors, key: tensors[key].reshape(4, 1)},
        r"vera_A \[4, 90\], and this base needs \[4, 96\]": {
            **tensors, "base_model.vera_A": tensors["base_model.vera_A"][:, :90].clone()
        },
    }  # fmt: skip
    for message, damaged in damages.items():
        save_file(damaged, file)
        with pytest.raises(AdapterError, match=message):
            executor.add_adapter("damaged", tmp_path)


def test_a_drawn_projection_survives_a_checkpoint(tmp_path: Path) -> None:
    base = oracle.random_model(BY_NAME["llama3"].config(2))
    data = [Example(s, s) for s in prompts((9, 12, 5))]
    recipe = {**FIELDS, "save_projection": False, "vera_dropout": 0.2}
    options = {"batch_size": 1, "schedule": "constant", "progress": False, "learning_rate": 0.05}
    whole = compiler.compile(base)
    result = whole.finetune(data, "a", peft=recipe, max_steps=4, **options)
    for steps in (2, 4):
        parts = compiler.compile(base)
        last = parts.finetune(
            data, "a", peft=recipe, max_steps=steps, checkpoint_dir=tmp_path, **options
        )
    assert last.losses == result.losses
    (sequence,) = prompts((9,))
    assert torch.equal(parts.logits([sequence], "a")[0], whole.logits([sequence], "a")[0])
