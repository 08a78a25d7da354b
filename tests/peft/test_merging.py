"""Merged checkpoints: the weights of peft's `merge_and_unload`, and refusals."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor

import pcg
from pcg.errors import AdapterError, UnsupportedError, WeightsError
from tests.support import oracle
from tests.support.command_line import assert_one_error, output_of, run
from tests.support.families import BY_NAME
from tests.support.peft_cases import CONFIGS, wrap
from tests.support.prompts import TOLERANCE, prompts


def _is_short(family: str, name: str) -> bool:
    return name in IN_SHORT or (family, name) == ("gpt2", "lora-bias")


UNMERGED = ("prompt", "prefix", "p-tuning")
IN_SHORT = ("lora-first", "dora-biases", "adalora-first", "vera-drawn", "loha-patterns", "ia3-all")
MERGED = [
    pytest.param(family, name, marks=() if _is_short(family, name) else pytest.mark.slow)
    for family, configs in CONFIGS.items()
    for name in configs
    if not name.startswith(UNMERGED)
]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, tuple[Any, Path]]:
    found = {}
    for family in CONFIGS:
        model = oracle.random_model(BY_NAME[family].config(2))
        found[family] = model, tmp_path_factory.mktemp(family)
        oracle.save_model(model, found[family][1])
    return found


def unwrapped(wrapped: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a tied head, which peft changes with the embedding
        return copy.deepcopy(wrapped).merge_and_unload()


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def difference(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(oracle.relative_error(ours[key], theirs[key]) for key in theirs)


def save_adapter(wrapped: Any, folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped.save_pretrained(folder, save_embedding_layers=False)


@pytest.mark.parametrize(("family", "name"), MERGED)
def test_merged_weights_are_pefts(
    bases: Mapping[str, tuple[Any, Path]], family: str, name: str, tmp_path: Path
) -> None:
    base, directory = bases[family]
    wrapped = wrap(base, CONFIGS[family][name])
    save_adapter(wrapped, tmp_path / "adapter")
    result = pcg.merge(directory, tmp_path / "adapter", tmp_path / "merged")
    assert 0 < result.relative_error < 1e-7 < result.relative_change
    merged = loaded(tmp_path / "merged")
    (sequence,) = prompts((9,))
    expected = oracle.logits(wrapped, sequence)
    assert oracle.relative_error(oracle.logits(merged, sequence), expected) < TOLERANCE
    if not merged.config.tie_word_embeddings and base.config.tie_word_embeddings:
        return  # peft changes the embedding with a tied head
    assert difference(merged.state_dict(), unwrapped(wrapped).state_dict()) < 1e-6


@pytest.mark.parametrize(
    "family",
    ["qwen3_moe", *(pytest.param(each, marks=pytest.mark.slow) for each in ("mixtral", "gpt_oss"))],
)
def test_experts(family: str, tmp_path: Path) -> None:
    base = oracle.random_model(BY_NAME[family].config(2))
    oracle.save_model(base, tmp_path / "base", shard="100KB")
    names = ["experts.gate_up_proj", "experts.down_proj"]
    wrapped = oracle.with_adapter(base, ["q_proj"], rank=3, parameters=names)
    oracle.save(wrapped, tmp_path / "adapter")
    pcg.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged", max_shard_size="50KB")
    merged = loaded(tmp_path / "merged")
    assert difference(merged.state_dict(), unwrapped(wrapped).state_dict()) < 1e-6


def test_a_tied_head_gets_a_weight_of_its_own(tmp_path: Path) -> None:
    config = {**BY_NAME["llama-biases"].config(2), "tie_word_embeddings": True}
    base = oracle.random_model(config)
    oracle.save_model(base, tmp_path / "base")
    wrapped = oracle.with_adapter(base, ["lm_head", "q_proj"], rank=3)
    save_adapter(wrapped, tmp_path / "adapter")
    pcg.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    merged = loaded(tmp_path / "merged")
    (sequence,) = prompts((9,))
    expected = oracle.logits(wrapped, sequence)
    assert oracle.relative_error(oracle.logits(merged, sequence), expected) < TOLERANCE
    assert torch.equal(merged.model.embed_tokens.weight, base.model.embed_tokens.weight)


@pytest.mark.parametrize(
    "name",
    ["lora", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dora", "ia3-all", "vera"))],
)
def test_half_precision_is_rounded_as_peft_rounds(name: str, tmp_path: Path) -> None:
    base = oracle.random_model(BY_NAME["llama-biases"].config(2), torch.bfloat16)
    oracle.save_model(base, tmp_path / "base")
    wrapped = wrap(base, CONFIGS["llama-biases"][name])
    save_adapter(wrapped, tmp_path / "adapter")
    result = pcg.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    assert 1e-4 < result.relative_error < 2**-9
    theirs = unwrapped(wrapped).state_dict()
    ours = loaded(tmp_path / "merged", torch.bfloat16).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def quantized_base(name: str, folder: Path) -> Path:
    sizes = {"hidden_size": 128, "intermediate_size": 384, "head_dim": 32}
    base = oracle.random_model({**BY_NAME["llama-biases"].config(2), **sizes})
    oracle.save_model(base, folder / "float")
    return pcg.quantize(folder / "float", name, folder / name)


OTHERS = ("nf4_single", "int8_weight", "fp8", "fp8_block", "int4_g64", "mxfp4")


@pytest.mark.parametrize(
    "name", ["nf4", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def test_a_quantized_base_stays_in_its_format(name: str, tmp_path: Path) -> None:
    """What is read from the folder is within the stated error of the sum in fp32."""
    folder = quantized_base(name, tmp_path)
    executor = pcg.compile(folder, {"a": "lora"})
    adapter = executor.adapters["a"]
    generator = torch.Generator().manual_seed(0)
    for tensor in adapter.tensors:
        tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))
    result = pcg.merge(folder, adapter, tmp_path / "merged")
    kept = json.loads((folder / "config.json").read_text())
    assert json.loads((tmp_path / "merged/config.json").read_text()) == kept
    merged = pcg.compile(tmp_path / "merged")
    ours, base = (dict(each.state.weight_store.linear()) for each in (merged, executor))
    error = exact = 0.0
    for path, weights in adapter.weights.items():
        whole = base[path] + weights.scale * weights.b @ weights.a
        error += (ours[path] - whole).square().sum()
        exact += whole.square().sum()
    assert (error / exact) ** 0.5 == pytest.approx(result.relative_error, rel=1e-3)
    assert result.relative_error < (0.15 if "4" in name else 0.05)
    floats = pcg.merge(folder, adapter, tmp_path / "floats", dtype="float32")
    assert floats.relative_error < 1e-7
    model = loaded(tmp_path / "floats")
    (sequence,) = prompts((9,))
    expected = executor.logits(sequence, "a")
    assert oracle.relative_error(oracle.logits(model, sequence), expected) < 10 * TOLERANCE


def test_a_bf16_base_becomes_floats(tmp_path: Path) -> None:
    """Of a small change, bf16 keeps less than half."""
    base = oracle.random_model(BY_NAME["llama-biases"].config(2))
    wrapped = wrap(base, CONFIGS["llama-biases"]["lora"])
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            parameter.data.mul_(0.03)
    save_adapter(wrapped, tmp_path / "adapter")
    oracle.save_model(base.bfloat16(), tmp_path / "base")
    merge = partial(pcg.merge, tmp_path / "base", tmp_path / "adapter")
    kept, floats = merge(tmp_path / "kept"), merge(tmp_path / "floats", dtype="float32")
    assert (kept.keeps_change, floats.keeps_change) == (False, True)
    model, (sequence,) = loaded(tmp_path / "floats"), prompts((9,))
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float32}
    executor = pcg.compile(tmp_path / "base", {"a": tmp_path / "adapter"}, dtype="float32")
    expected = executor.logits(sequence, "a")
    assert oracle.relative_error(oracle.logits(model, sequence), expected) < 10 * TOLERANCE


def test_what_cannot_be_merged_is_refused(
    bases: Mapping[str, tuple[Any, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, directory = bases["llama-biases"]
    refused = {
        "no bias in the base": peft.LoraConfig(target_modules=["lm_head"], lora_bias=True),
        "prompt tuning is no change of the": CONFIGS["llama-biases"]["prompt"],
    }
    for words, config in refused.items():
        save_adapter(wrap(base, config), tmp_path / config.peft_type.value)
        with pytest.raises(UnsupportedError, match=words):
            pcg.merge(directory, tmp_path / config.peft_type.value, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    with pytest.raises(WeightsError, match="holds the base itself"):
        pcg.merge(directory, tmp_path / "LORA", directory, overwrite=True)
    with pytest.raises(UnsupportedError, match="use one of float32, bfloat16, float16"):
        pcg.merge(directory, tmp_path / "LORA", tmp_path / "merged", dtype="int8")
    with pytest.raises(AdapterError, match="give the directory of a saved adapter"):
        pcg.merge(directory, tmp_path / "nothing", tmp_path / "merged")
    save_adapter(wrap(base, CONFIGS["llama-biases"]["lora"]), tmp_path / "LORA")
    size_bytes = (directory / "model.safetensors").stat().st_size
    for dtype, least in ((None, size_bytes), ("bfloat16", size_bytes * 0.45)):
        disk = SimpleNamespace(free=int(least) - 1)
        monkeypatch.setattr("shutil.disk_usage", lambda _, disk=disk: disk)
        with pytest.raises(WeightsError, match=r"the merged model takes .* free; give a place on"):
            pcg.merge(directory, tmp_path / "LORA", tmp_path / "merged", dtype=dtype)
    assert not (tmp_path / "merged").exists()


def test_the_command(bases: Mapping[str, tuple[Any, Path]], tmp_path: Path) -> None:
    base, directory = bases["opt"]
    wrapped = wrap(base, CONFIGS["opt"]["lora"])
    save_adapter(wrapped, tmp_path / "adapter")
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged" / "old").touch()
    arguments = "merge", directory, "--adapter", tmp_path / "adapter", "-o", tmp_path / "merged"
    refused = "is not empty; give a new folder for the merged model, or --overwrite"
    assert_one_error(run(*arguments), refused)
    printed = json.loads(output_of(*arguments, "--overwrite", "--json"))
    assert printed["matrices"] == 12
    assert not (tmp_path / "merged" / "old").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert len({path.stat().st_mode for path in (tmp_path / "merged").iterdir()}) == 1
    merged = loaded(tmp_path / "merged")
    assert difference(merged.state_dict(), unwrapped(wrapped).state_dict()) < 1e-6
