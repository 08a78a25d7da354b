"""LoRA on a head as peft saves it: with a copy of the base's own weight beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from pcg.errors import UnsupportedError
from pcg.runtime.executor import Executor
from tests.support import compiled, oracle
from tests.support.families import BY_NAME
from tests.support.lora_pair import lora_pair, small_llama
from tests.support.prompts import TOLERANCE

RECIPES: dict[str, dict[str, Any]] = {"head": {"r": 2, "target_modules": ["q_proj", "lm_head"]}}
PREFIX = "base_model.model."
COPY = f"{PREFIX}lm_head.base_layer.weight"
PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def pair() -> tuple[Executor, PeftModel]:
    return lora_pair(RECIPES, small_llama())


@pytest.fixture
def saved(pair: tuple[Executor, PeftModel], tmp_path: Path) -> Path:
    with pytest.warns(UserWarning, match="Setting `save_embedding_layers` to `True`"):
        pair[1].save_pretrained(str(tmp_path))
    return tmp_path / "head"


def changed(saved: Path, **tensors: torch.Tensor) -> Path:
    file = saved / "adapter_model.safetensors"
    content = {**load_file(file), **{PREFIX + name: one for name, one in tensors.items()}}
    save_file({name: one.contiguous() for name, one in content.items()}, file)
    return saved


def test_a_head_is_taken_as_peft_saves_it(pair: tuple[Executor, PeftModel], saved: Path) -> None:
    executor, theirs = pair
    assert COPY in load_file(saved / "adapter_model.safetensors")
    executor.add_adapter("theirs", saved, replace=True)
    with torch.inference_mode():
        expected = theirs(input_ids=torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(executor.logits(PROMPT, "theirs"), expected, rtol=1e-5, atol=1e-5)


def test_copies_in_half_precision_and_of_the_embedding_are_known(
    pair: tuple[Executor, PeftModel], saved: Path
) -> None:
    """`save_embedding_layers=True` and a base that was trained in bfloat16."""
    base: Any = pair[1].base_model.model
    copies = {
        "lm_head.base_layer.weight": base.lm_head.base_layer.weight.detach().bfloat16(),
        "model.embed_tokens.weight": base.model.embed_tokens.weight.detach().clone(),
    }
    pair[0].add_adapter("half", changed(saved, **copies), replace=True)


@pytest.mark.parametrize("name", ["lm_head.base_layer.weight", "model.embed_tokens.weight"])
@pytest.mark.parametrize("change", ["a value", "rows"])
def test_another_head_or_embedding_is_refused(
    pair: tuple[Executor, PeftModel], saved: Path, name: str, change: str
) -> None:
    base: Any = pair[1].base_model.model
    other = base.get_submodule(name.removesuffix(".weight")).weight.detach().clone()
    other = (
        torch.cat([other, other[:2]])
        if change == "rows"
        else other.index_fill(0, torch.tensor([7]), 1.0)
    )
    with pytest.raises(UnsupportedError, match=rf"{name}: .* as the vocabulary was changed"):
        pair[0].add_adapter("other", changed(saved, **{name: other}))


def test_a_copy_of_the_heads_bias_is_known_or_refused(tmp_path: Path) -> None:
    base = oracle.random_model(BY_NAME["phi"].config(2))
    theirs = oracle.with_adapter(base, ["q_proj", "lm_head"], rank=2)
    oracle.save(theirs, tmp_path)
    executor = compiled.executor(base, {"theirs": str(tmp_path)})
    found = executor.logits(PROMPT, "theirs")
    assert oracle.relative_error(found, oracle.logits(theirs, PROMPT)) < TOLERANCE
    name = "lm_head.base_layer.bias"
    other = base.lm_head.bias.detach() + 1
    with pytest.raises(UnsupportedError, match=rf"{name}: .* as the vocabulary was changed"):
        executor.add_adapter("other", changed(tmp_path, **{name: other}))
