"""Adapters as files of llama.cpp: their products, in its order of rows, and its tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from torch import Tensor

import pcg
from pcg.errors import UnsupportedError, WeightsError
from pcg.peft.weights import Around
from tests.support import oracle
from tests.support.command_line import assert_one_error, output_of, run
from tests.support.gguf_models import Kind, random_gguf

RECIPES: dict[str, dict[str, Any]] = {
    "lora": {"peft_type": "LORA", "r": 4, "rank_pattern": {"k_proj": 2}, "use_rslora": True},
    "vera": {"peft_type": "VERA", "r": 5},
    "loha": {"peft_type": "LOHA", "r": 2},
}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]


def model_with(
    folder: Path,
    method: str,
    architecture: str = "llama",
    kind_of: Callable[[str], Kind] = lambda _: Kind.F32,
) -> tuple[Path, Any]:
    """A GGUF file, and an executor with an adapter of a method that does something."""
    extra = {"head_dim": 64} if architecture == "qwen3" else {}
    extra["vocab_size"] = 428  # as many as the toy tokenizer has, for llama.cpp
    path = random_gguf(folder / "base.gguf", architecture, kind_of, **extra)
    recipe = {**RECIPES[method], "target_modules": TARGETS}
    executor = pcg.compile(path, {"a": recipe})
    generator = torch.Generator().manual_seed(3)
    for tensor in executor.adapters["a"].tensors:
        tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))
    executor.refresh_adapter("a")
    return path, executor


def in_file(weight: Tensor, module: str, architecture: str) -> Tensor:
    """A matrix as `random_gguf` writes it, by heads of 64 rows."""
    if architecture != "llama" or module not in ("q_proj", "k_proj"):
        return weight
    return weight.view(-1, 2, 32, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


@pytest.mark.parametrize(
    ("method", "architecture"), [("lora", "llama"), ("vera", "llama"), ("loha", "qwen3")]
)
def test_products_are_the_change_of_the_file(
    method: str, architecture: str, tmp_path: Path
) -> None:
    path, executor = model_with(tmp_path, method, architecture)
    shapes = executor.program.base.module_shapes()
    reader = gguf.GGUFReader(pcg.export(path, executor.adapters["a"], tmp_path / "a.gguf"))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.type"] == "adapter"
    assert fields["adapter.type"] == "lora"
    assert fields["general.architecture"] == architecture
    tensors = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in reader.tensors}
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, 2)
    adapter = executor.adapters["a"]
    assert len(tensors) == 2 * len(adapter.weights) == 2 * 2 * len(TARGETS)
    for module, weights in adapter.weights.items():
        a, b = (tensors[f"{names.get_name(module)}.weight.lora_{part}"] for part in "ab")
        product = b @ a * fields["adapter.lora.alpha"] / len(a)
        zeros = torch.zeros(shapes[module])
        change = weights.merged(zeros, Around(lambda: torch.empty(0), adapter.shared, zeros.shape))
        expected = in_file(change, module.rpartition(".")[2], architecture)
        torch.testing.assert_close(product, expected, rtol=1e-4, atol=1e-5)


def test_the_command_and_its_refusals(tmp_path: Path) -> None:
    path, executor = model_with(tmp_path, "lora")
    executor.save_adapter("a", tmp_path / "a")
    arguments = "export", path, "--adapter", tmp_path / "a", "-o", tmp_path / "a.gguf"
    output_of(*arguments)
    assert_one_error(run(*arguments), "a.gguf exists; give another file")
    output_of(*arguments, "--overwrite", "--format", "gguf")
    assert_one_error(run(*arguments, "--overwrite", "--format", "safetensors"), "to gguf; for safe")
    for recipe, words in {
        "dora": "without DoRA at",
        "ia3": r"without \(IA\)³ at",
        "prompt": "without prompt tuning at the prompt",
    }.items():
        adapter = executor.add_adapter(recipe, recipe)
        with pytest.raises(UnsupportedError, match=words):
            pcg.export(path, adapter, tmp_path / "b.gguf")
    with pytest.raises(WeightsError, match="cannot be saved in"):
        pcg.export(path, executor.adapters["a"], path / "b.gguf")


def test_a_merged_file_has_the_sum_in_its_types(tmp_path: Path) -> None:
    kinds = {"attn_q": Kind.Q8_0, "ffn_down": Kind.Q4_0, "attn_k": Kind.F16}
    path, executor = model_with(
        tmp_path, "lora", kind_of=lambda name: kinds.get(name.split(".")[-2], Kind.F32)
    )
    adapter, base = executor.adapters["a"], executor.state.weight_store.linear()
    result = pcg.merge(path, adapter, tmp_path / "merged.gguf")
    error = exact = 0.0
    before, after = (gguf.GGUFReader(each) for each in (path, result.path))
    assert before.fields.keys() == after.fields.keys()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    modules = {f"{names.get_name(module)}.weight": module for module in adapter.weights}
    for old, new in zip(before.tensors, after.tensors, strict=True):
        assert (old.name, old.tensor_type) == (new.name, new.tensor_type)
        if old.name not in modules:
            assert (old.data == new.data).all()
            continue
        module = modules[old.name]
        weights = adapter.weights[module]
        whole = base[module] + weights.scale * weights.b @ weights.a
        whole = in_file(whole, module.rpartition(".")[2], "llama")
        stored = torch.tensor(gguf.quants.dequantize(new.data, new.tensor_type))
        error += float((stored - whole).square().sum())
        exact += float(whole.square().sum())
    assert (error / exact) ** 0.5 == pytest.approx(result.relative_error, rel=1e-3)
    assert result.relative_error < 0.1
    assert pcg.merge(path, adapter, result.path, overwrite=True) == result
    with pytest.raises(WeightsError, match="exists; give another file"):
        pcg.merge(path, adapter, result.path)
    sixes = random_gguf(tmp_path / "sixes.gguf", kind_of=lambda _: Kind.Q6_K)
    with pytest.raises(UnsupportedError, match="reads q6_k of GGUF files and does not write it"):
        pcg.merge(sixes, adapter, tmp_path / "sixes-merged.gguf")


def test_a_file_is_merged_into_a_float_folder(tmp_path: Path) -> None:
    path, executor = model_with(tmp_path, "lora", kind_of=lambda _: Kind.Q4_0)
    adapter, prompt = executor.adapters["a"], list(range(5, 30))
    result = pcg.merge(path, adapter, tmp_path / "merged", dtype="float32")
    assert (result.relative_error < 1e-7, result.keeps_change) == (True, True)
    model = transformers.AutoModelForCausalLM.from_pretrained(result.path)
    expected = executor.logits([prompt], "a")[0]
    assert oracle.relative_error(oracle.logits(model, prompt), expected) < 1e-5
    with pytest.raises(WeightsError, match="is not empty"):
        pcg.merge(path, adapter, tmp_path / "merged", dtype="float32")


def test_a_format_that_rounds_the_change_away_is_named(tmp_path: Path) -> None:
    path, executor = model_with(tmp_path, "lora", kind_of=lambda _: Kind.Q4_0)
    for tensor in executor.adapters["a"].tensors:
        tensor.mul_(0.1)
    executor.save_adapter("a", tmp_path / "a")
    arguments = "merge", path, "--adapter", tmp_path / "a", "-o", tmp_path / "merged.gguf"
    done = run(*arguments)
    assert "may not answer as the adapter does; write floats" in done.stderr
    done = run(*arguments[:-1], tmp_path / "merged", "--dtype", "float32")
    assert done.stderr.startswith(f"{path} + ")
    assert "may not answer" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "architecture"), [("lora", "llama"), ("vera", "qwen2"), ("loha", "qwen3")]
)
def test_tokens_are_those_of_llama_cpp(method: str, architecture: str, tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    path, executor = model_with(tmp_path, method, architecture)
    adapter = executor.adapters["a"]
    exported = pcg.export(path, adapter, tmp_path / "a.gguf")
    merged = pcg.merge(path, adapter, tmp_path / "merged.gguf").path
    prompts = [list(range(5, 5 + length)) for length in (3, 17)]
    done = {
        name: [
            list(completion.token_ids)
            for completion in executor.generate(prompts, name, max_new_tokens=24, ignore_eos=True)
        ]
        for name in ("a", None)
    }
    assert done["a"] != done[None]
    for name, model, lora in (("a", path, exported), ("a", merged, None), (None, path, None)):
        llama = llama_cpp.Llama(str(model), lora_path=lora and str(lora), n_ctx=128, verbose=False)
        for prompt, expected in zip(prompts, done[name], strict=True):
            tokens = llama.generate(prompt, temp=0.0, repeat_penalty=1.0)
            assert [next(tokens) for _ in range(24)] == expected
