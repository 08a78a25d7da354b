"""Weights against transformers' own: what it saves is found under the names of its modules."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from pcg.errors import WeightsError
from pcg.runtime.model.base_weights import base_digest
from pcg.runtime.model.weights import Checkpoint, StateDictCheckpoint, Weights
from pcg.source import ModelSource, resolve
from tests.support import compiled
from tests.support.small_job import make_model

SMALL = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 32, "num_attention_heads": 2,
         "num_key_value_heads": 1, "num_hidden_layers": 2}  # fmt: skip
CONFIGS = {
    "llama": transformers.LlamaConfig(**SMALL),
    "mixtral": transformers.MixtralConfig(**SMALL, num_local_experts=3),
    "qwen3_moe": transformers.Qwen3MoeConfig(
        **SMALL, num_experts=4, moe_intermediate_size=8, head_dim=8
    ),
    "gpt2": transformers.GPT2Config(
        n_embd=16, n_head=2, n_layer=2, vocab_size=32, bos_token_id=0, eos_token_id=0
    ),
    "opt": transformers.OPTConfig(
        hidden_size=16, ffn_dim=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=32,
        word_embed_proj_dim=16,
    ),
    "falcon": transformers.FalconConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=32
    ),
}  # fmt: skip


def build(model_type: str) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[model_type])


def tied(model: Any) -> set[str]:
    return set(model.all_tied_weights_keys)


def assert_same_weights(weights: Weights, model: Any) -> None:
    for name, parameter in model.named_parameters():
        if name not in tied(model):
            loaded = weights.load(name, tuple(parameter.shape), torch.float32)
            assert torch.equal(loaded, parameter), name


@pytest.mark.parametrize("model_type", CONFIGS)
def test_what_transformers_saves(model_type: str, tmp_path: Path) -> None:
    model = build(model_type)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    source = resolve(tmp_path)
    assert len(source.weight_files) > 1
    weights = Checkpoint.open(source, model.base_model_prefix)
    assert len(weights.unused()) == len(weights.index)
    assert_same_weights(weights, model)
    assert weights.unused() == ()


@pytest.mark.parametrize("model_type", ["gpt2", "opt", "falcon", "llama"])
@pytest.mark.parametrize("headless", [True, False])
def test_checkpoints_without_their_head(model_type: str, headless: bool, tmp_path: Path) -> None:
    """`h.0.…` for `transformer.h.0.…`, and the other way round."""
    model = build(model_type)
    (model.base_model if headless else model).save_pretrained(tmp_path)
    other = model if headless else model.base_model
    weights = Checkpoint.open(resolve(tmp_path), model.base_model_prefix)
    for name, parameter in other.named_parameters():
        if name == "lm_head.weight":
            continue
        assert torch.equal(weights.load(name, tuple(parameter.shape), torch.float32), parameter)


def test_dtypes_layout_and_sharing(tmp_path: Path) -> None:
    matrix = torch.randn(3, 5)
    save_file({"w": matrix, "b": torch.ones(5).bfloat16()}, tmp_path / "model.safetensors")
    source = ModelSource("m", {}, tmp_path, (tmp_path / "model.safetensors",))
    for weights in (Checkpoint.open(source), StateDictCheckpoint({"w": matrix})):
        transposed = weights.load("w", (5, 3), torch.float32, transposed=True)
        assert transposed.is_contiguous()
        assert torch.equal(transposed, matrix.t())
        assert torch.equal(weights.load("w", (3, 5), torch.bfloat16), matrix.bfloat16())
        assert not weights.load("w", (3, 5), torch.float32).requires_grad
    assert Checkpoint.open(source).load("b", (5,), torch.float32).dtype == torch.float32


def test_a_module_shares_its_weights() -> None:
    model = build("mixtral")
    weights = StateDictCheckpoint(model.state_dict(), model.base_model_prefix)
    assert_same_weights(weights, model)
    name = "model.layers.0.self_attn.q_proj.weight"
    loaded = weights.load(name, (16, 16), torch.float32)
    assert loaded.data_ptr() == model.get_parameter(name).data_ptr()
    assert weights.load(name, (16, 16), torch.float16).dtype == torch.float16
    assert name not in weights.unused()
    with torch.device("meta"):
        empty = build("llama")
    with pytest.raises(WeightsError, match="on the meta device; load its weights"):
        StateDictCheckpoint(empty.state_dict())


def test_loading_costs_one_tensor(tmp_path: Path) -> None:
    """Opening and loading map the file: no copy of 64 MiB shows in what the process holds."""
    save_file({f"w{i}": torch.zeros(1024, 4096) for i in range(4)}, tmp_path / "model.safetensors")
    source = ModelSource("m", {}, tmp_path, (tmp_path / "model.safetensors",))

    def anonymous_bytes() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

    before = anonymous_bytes()
    weights = Checkpoint.open(source)
    loaded = weights.load("w2", (1024, 4096), torch.float32)
    assert float(loaded.sum()) == 0
    assert anonymous_bytes() - before < 8 << 20
    assert weights.unused() == ("w0", "w1", "w3")


# ------------------------------------------------------------------------------------------ refused


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    build("llama").save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("keep", [0, 7, 8, 100, 3000, -1])
def test_truncated_files(saved: Path, keep: int) -> None:
    file = saved / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:keep])
    with pytest.raises(WeightsError, match=r"truncated|damaged") as error:
        Checkpoint.open(resolve(saved))
    assert str(file) in str(error.value)
    if keep == -1:
        assert f"describes {len(content)} bytes, the file has {len(content) - 1}" in str(
            error.value
        )


@pytest.mark.parametrize(
    "header", [b"[]", b'{"w": 1}', b'{"w": {"dtype": "F32"}}', b'{"w"', b"\xff\xfe"]
)
def test_damaged_headers(saved: Path, header: bytes) -> None:
    file = saved / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(WeightsError, match=r"model.safetensors.* is damaged"):
        Checkpoint.open(resolve(saved))


def test_a_header_that_lies(saved: Path) -> None:
    """Offsets that add up but do not fit the shapes: safetensors finds out, we tell."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}).encode()
    file = saved / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(WeightsError, match=r"model.safetensors cannot be read at w"):
        Checkpoint.open(resolve(saved)).load("w", (3,), torch.float32)


def test_missing_tensors(saved: Path, tmp_path: Path) -> None:
    weights = Checkpoint.open(resolve(saved), "model")
    with pytest.raises(WeightsError, match="is not among the 21 tensors") as error:
        weights.load("model.layers.0.self_attn.g_proj.weight", (16, 16), torch.float32)
    assert "nor layers.0.self_attn.g_proj.weight" in str(error.value)
    assert "the closest are model.layers.0.self_attn." in str(error.value)
    with pytest.raises(WeightsError, match=r"experts.gate_up_proj is not among"):
        weights.load("model.layers.0.mlp.experts.gate_up_proj", (2, 4, 4), torch.float32)
    with pytest.raises(WeightsError, match="has no weights"):
        Checkpoint.open(ModelSource("none", {}))
    with pytest.raises(WeightsError, match="cannot be read"):
        Checkpoint.open(ModelSource("gone", {}, tmp_path, (tmp_path / "gone.safetensors",)))


def test_a_tensor_in_two_files(saved: Path) -> None:
    file = saved / "model.safetensors"
    content = load_file(file)
    save_file({"lm_head.weight": content["lm_head.weight"]}, saved / "b.safetensors")
    with pytest.raises(WeightsError, match=r"lm_head.weight is both in"):
        Checkpoint.open(ModelSource("m", {}, saved, (file, saved / "b.safetensors")))


def test_shapes_that_do_not_fit(saved: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps({**config, "intermediate_size": 48}))
    weights = Checkpoint.open(resolve(saved), "model")
    with pytest.raises(WeightsError) as error:
        weights.load("model.layers.1.mlp.up_proj.weight", (48, 16), torch.float32)
    for part in ("is [32, 16] in ", "model.safetensors", "wants [48, 16]", "intermediate_size=48"):
        assert part in str(error.value)
    with pytest.raises(WeightsError, match=r"is \[32, 16\]"):
        weights.load("model.layers.1.mlp.up_proj.weight", (32, 16), torch.float32, transposed=True)


def test_experts_that_do_not_fit(tmp_path: Path) -> None:
    build("mixtral").save_pretrained(tmp_path)
    weights = Checkpoint.open(resolve(tmp_path), "model")
    with pytest.raises(
        WeightsError, match=r"experts.0.w1.weight is \[32, 16\] .* wants \[40, 16\]"
    ):
        weights.load("model.layers.0.mlp.experts.gate_up_proj", (3, 80, 16), torch.float32)


def test_quantized_weights(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"w": torch.zeros(4, 4, dtype=torch.int8)}, file)
    with pytest.raises(WeightsError, match=r"w is I8 in .*quantized"):
        Checkpoint.open(ModelSource("m", {}, tmp_path, (file,))).load("w", (4, 4), torch.float32)
    module = StateDictCheckpoint({"w": torch.zeros(4, dtype=torch.int32)})
    with pytest.raises(WeightsError, match=r"w is torch.int32 in the given module"):
        module.load("w", (4,), torch.float32)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_may_not_be_read(saved: Path) -> None:
    source = resolve(saved)
    (saved / "model.safetensors").chmod(0)
    with pytest.raises(WeightsError, match="cannot be read: Permission denied"):
        Checkpoint.open(source)


# ------------------------------------------------------------------------------------------ digests


def test_each_entry_changes_it_and_the_type_of_loading_does_not() -> None:
    model = make_model().to(torch.bfloat16)
    stores = [
        compiled.executor(model, dtype=dtype).state.weight_store
        for dtype in ("bfloat16", "float32")
    ]
    exact = {base_digest(store) for store in stores}
    (rounded,) = {base_digest(store, torch.bfloat16) for store in stores}
    assert len(exact) == 2
    for name, parameter in model.named_parameters():
        entry = parameter.data.view(-1)[torch.randint(parameter.numel(), ())]
        before = entry.clone()
        entry += 0.125
        store = compiled.executor(model, dtype="float32").state.weight_store
        assert base_digest(store, torch.bfloat16) != rounded, name
        entry.copy_(before)
