"""Adapters in peft's format: peft writes, we read and write, and peft reads."""

import json
import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers.pytorch_utils import Conv1D

from pcg.errors import AdapterError, UnsupportedError
from pcg.peft.adapter import Adapter, check_fits, new_adapter
from pcg.peft.adapter_files import read_adapter, write_adapter
from pcg.peft.lora import LoraConfig, LoraWeights
from pcg.peft.registry import SHORTHANDS

CONFIGS = {
    "qwen2": transformers.Qwen2Config(
        hidden_size=16, intermediate_size=32, vocab_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1,
    ),
    "gpt2": transformers.GPT2Config(
        n_embd=16, n_head=2, n_layer=2, vocab_size=32, bos_token_id=0, eos_token_id=0
    ),
}  # fmt: skip
IDS = torch.arange(12).reshape(2, 6)


def model(model_type: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    made = transformers.AutoModelForCausalLM.from_config(CONFIGS[model_type]).eval()
    for name, parameter in made.named_parameters():
        if name.endswith("bias"):  # zero at first, so that a wrong one would not show
            torch.nn.init.normal_(parameter, std=0.1)
    return made


def shapes(base: torch.nn.Module) -> dict[str, tuple[int, int]]:
    found = {}
    for name, module in base.named_modules():
        if isinstance(module, torch.nn.Linear | Conv1D):
            out, in_ = module.weight.shape
            found[name] = (in_, out) if isinstance(module, Conv1D) else (out, in_)
    return found


def tuned(model_type: str, **config: Any) -> Any:
    """A peft model whose adapter does something."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = peft.get_peft_model(
            model(model_type), peft.LoraConfig(task_type="CAUSAL_LM", **config)
        ).eval()
    for _, parameter in sorted(wrapped.named_parameters()):
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    return wrapped


def peft_reads(model_type: str, path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
        return peft.PeftModel.from_pretrained(model(model_type), path).eval()


def logits(any_model: Any) -> torch.Tensor:
    with torch.no_grad():
        return any_model(IDS).logits


FEATURES: dict[str, tuple[str, dict[str, Any]]] = {
    "list": ("qwen2", {"target_modules": ["q_proj", "down_proj"]}),
    "default": ("qwen2", {}),
    "regex": ("qwen2", {"target_modules": r".*\.1\..*_proj"}),
    "all-linear": ("qwen2", {"target_modules": "all-linear", "lora_dropout": 0.1}),
    "rslora": ("qwen2", {"target_modules": ["q_proj"], "use_rslora": True, "r": 3}),
    "patterns": ("qwen2", {
        "target_modules": ["q_proj", "v_proj", "up_proj"], "lora_alpha": 5,
        "rank_pattern": {r"1\.self_attn\..*": 3, "v_proj": 2},
        "alpha_pattern": {r".*\.1\.mlp\..*": 64, "self_attn.q_proj": 0.5},
    }),
    "layers": ("qwen2", {
        "target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1],
        "layers_pattern": "layers", "exclude_modules": ["v_proj"],
    }),
    "lora_bias": ("qwen2", {"target_modules": ["q_proj"], "lora_bias": True}),
    "bias lora_only": ("qwen2", {"target_modules": ["q_proj", "o_proj"], "bias": "lora_only"}),
    "bias all": ("gpt2", {"target_modules": ["c_attn"], "bias": "all"}),
    "conv1d": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "gaussian": ("gpt2", {"target_modules": ["c_fc"], "init_lora_weights": "gaussian"}),
}  # fmt: skip


@pytest.mark.parametrize("feature", FEATURES)
def test_peft_reads_what_we_write_of_what_it_wrote(feature: str, tmp_path: Path) -> None:
    """Same logits, keys, shapes, dtypes, values and config, and ours is read back the same."""
    model_type, config = FEATURES[feature]
    theirs = tuned(model_type, **config)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*have invalid shape")  # any lora_B.bias
        theirs.save_pretrained(tmp_path / "theirs")
    adapter = read_adapter(tmp_path / "theirs", "mine")
    check_fits(adapter, shapes(model(model_type)), output_layer="lm_head")
    scaling = {
        name: module.scaling["default"]
        for name, module in theirs.base_model.model.named_modules()
        if isinstance(module, peft.tuners.lora.LoraLayer)
    }
    assert {path: weights.scale for path, weights in adapter.weights.items()} == scaling

    write_adapter(adapter, tmp_path / "ours")
    assert torch.equal(logits(peft_reads(model_type, tmp_path / "ours")), logits(theirs))
    ours, peft_tensors = (
        load_file(tmp_path / side / "adapter_model.safetensors") for side in ("ours", "theirs")
    )
    assert ours.keys() == peft_tensors.keys()
    for key, tensor in ours.items():
        assert tensor.dtype == peft_tensors[key].dtype
        assert torch.equal(tensor, peft_tensors[key])
    our_config, peft_config = (
        json.loads((tmp_path / side / "adapter_config.json").read_text())
        for side in ("ours", "theirs")
    )
    for fields in (our_config, peft_config):  # peft writes a set, in any order
        if isinstance(fields["target_modules"], list):
            fields["target_modules"].sort()
    if isinstance(config.get("layers_pattern"), str):
        peft_config["layers_pattern"] = [config["layers_pattern"]]
    assert our_config == peft_config

    again = read_adapter(tmp_path / "ours", "mine")
    assert (again.recipe, again.extra) == (adapter.recipe, adapter.extra)
    assert {p: w.scale for p, w in again.weights.items()} == scaling
    assert again.replaced.keys() == adapter.replaced.keys()


@pytest.mark.parametrize(
    ("model_type", "recipe", "extra"),
    [
        ("qwen2", SHORTHANDS["lora"], {}),
        ("qwen2", LoraConfig(), {}),
        (
            "qwen2",
            LoraConfig(target_modules=["q_proj"], lora_bias=True, init_lora_weights=False),
            {},
        ),
        ("gpt2", LoraConfig(target_modules="all-linear", r=4), {"fan_in_fan_out": True}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_new_adapter_is_one_for_peft(
    model_type: str, recipe: LoraConfig, extra: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    base = model(model_type)
    adapter = new_adapter(
        "fresh", recipe, shapes(base), dtype, 7, output_layer="lm_head", model_type=model_type
    )
    adapter = replace(adapter, base_model_name="tiny", extra={**adapter.extra, **extra})
    write_adapter(adapter, tmp_path / "fresh")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["fresh"]
    wrapped = peft_reads(model_type, tmp_path / "fresh")
    if recipe.init_lora_weights is True:
        assert torch.equal(logits(wrapped), logits(base))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*have invalid shape")  # any lora_B.bias
        state = peft.get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    saved = load_file(tmp_path / "fresh" / "adapter_model.safetensors")
    assert state.keys() == saved.keys()
    assert {tensor.dtype for tensor in saved.values()} == {dtype}
    check_fits(read_adapter(tmp_path / "fresh", "x"), shapes(base))
    config = json.loads((tmp_path / "fresh" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "tiny"


def test_initialisation_is_pefts() -> None:
    wide = {"a.q": (4096, 1024), "a.k": (64, 1024)}
    recipe = LoraConfig(target_modules=("q", "k"), r=64)
    adapter = new_adapter("x", recipe, wide, seed=3)
    a = adapter.weights["a.q"].a
    torch.manual_seed(0)
    oracle = peft.tuners.lora.Linear(torch.nn.Linear(1024, 4096), "d", peft.LoraConfig(), 64, 8)
    theirs = oracle.lora_A["d"].weight
    assert a.abs().max() <= 1 / math.sqrt(1024)
    assert torch.allclose(a.std(), theirs.std(), rtol=0.02)
    assert torch.allclose(a.abs().max(), theirs.abs().max(), rtol=0.01)
    assert not adapter.weights["a.q"].b.any()
    # The seed decides, and what else is adapted does not matter.
    alone = LoraConfig(target_modules=("q",), r=64)
    assert torch.equal(new_adapter("y", alone, wide, seed=3).weights["a.q"].a, a)
    assert not torch.equal(new_adapter("y", alone, wide, seed=4).weights["a.q"].a, a)

    gaussian = LoraConfig(target_modules=("q",), r=64, init_lora_weights="gaussian")
    weights = new_adapter("x", gaussian, wide).weights["a.q"]
    assert torch.allclose(weights.a.std(), torch.tensor(1 / 64), rtol=0.02)
    assert not weights.b.any()
    random = LoraConfig(target_modules=("q",), r=64, init_lora_weights=False, lora_bias=True)
    weights = new_adapter("x", random, wide).weights["a.q"]
    assert weights.bias is not None
    assert torch.allclose(weights.b.abs().max(), torch.tensor(1 / 8), rtol=0.01)
    assert torch.allclose(weights.bias.abs().max(), torch.tensor(1 / 8), rtol=0.01)
    with pytest.raises(UnsupportedError, match="'eva'"):
        new_adapter("x", LoraConfig(target_modules=("q",), init_lora_weights="eva"), wide)


def test_patterns_keep_their_order(tmp_path: Path) -> None:
    """The first match counts, so that sorted keys, as peft writes them, would change the scale."""
    recipe = LoraConfig(target_modules=("q",), alpha_pattern={"q": 2, r"a\.q": 64})
    write_adapter(new_adapter("x", recipe, {"a.q": (4, 4)}), tmp_path / "x")
    assert read_adapter(tmp_path / "x", "x").weights["a.q"].scale == 2 / 8
    config = peft.LoraConfig.from_pretrained(tmp_path / "x")
    assert list(config.alpha_pattern) == ["q", r"a\.q"]


def test_patterns_that_peft_put_in_another_order_are_told(tmp_path: Path) -> None:
    """peft sorts them on saving, and then cannot read the file itself."""
    ranks = {"v_proj": 2, r"1\.self_attn\..*": 3}
    theirs = tuned("qwen2", target_modules=["q_proj", "v_proj"], rank_pattern=ranks)
    theirs.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="size mismatch"):
        peft_reads("qwen2", tmp_path)
    with pytest.raises(AdapterError, match=r"rank 2 .* gives it rank 3 .*peft sorts keys"):
        read_adapter(tmp_path, "x")


def test_views_of_a_pool_are_saved(tmp_path: Path) -> None:
    pool = torch.randn(8, 6)
    weights = {"a.q": LoraWeights(pool[:2], pool[2:8, :2], 4.0)}
    adapter = Adapter("x", LoraConfig(target_modules=("q",), r=2), weights)
    write_adapter(adapter, tmp_path)
    again = read_adapter(tmp_path, "x").weights["a.q"]
    assert torch.equal(again.a, pool[:2])
    assert torch.equal(again.b, pool[2:8, :2])
    assert adapter.size_bytes == 4 * (2 * 6 + 6 * 2)
