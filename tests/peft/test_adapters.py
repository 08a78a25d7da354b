"""Adapters in peft's format: peft writes, we read and write, peft reads; and what is refused.

Long because every way an adapter file can be wrong is a test of its own.
"""

import json
import math
import resource
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.pytorch_utils import Conv1D

from pcg.errors import AdapterError, UnsupportedError
from pcg.peft import writer as adapter_writer
from pcg.peft.adapter import Adapter, check_fits, new_adapter
from pcg.peft.lora import LoraConfig, LoraWeights
from pcg.peft.reader import read_adapter
from pcg.peft.registry import RECIPES, SHORTHANDS, recipe_from
from pcg.peft.writer import write_adapter

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
    assert again.biases.keys() == adapter.biases.keys()


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


# ----------------------------------------------------------------------------------------- recipes


def test_recipes_from_everything() -> None:
    assert recipe_from("lora") == SHORTHANDS["lora"]
    recipe = LoraConfig(r=3)
    assert recipe_from(recipe) is recipe
    assert recipe_from(peft.LoraConfig()) == LoraConfig()
    assert recipe_from({"peft_type": "LORA", "rank_pattern": None}) == LoraConfig()
    config = peft.LoraConfig(
        r=4, lora_alpha=7, target_modules=["b", "a"], exclude_modules="x.*", use_rslora=True,
        bias="all", lora_dropout=0.25, layers_to_transform=3, layers_pattern="h",
        rank_pattern={"a": 2}, alpha_pattern={"b": 3}, lora_bias=True, init_lora_weights=False,
        task_type="CAUSAL_LM", revision="main", qalora_group_size=8,
    )  # fmt: skip
    expected = LoraConfig(
        r=4, lora_alpha=7, target_modules=("a", "b"), exclude_modules="x.*", use_rslora=True,
        bias="all", lora_dropout=0.25, layers_to_transform=(3,), layers_pattern=("h",),
        rank_pattern={"a": 2}, alpha_pattern={"b": 3}, lora_bias=True, init_lora_weights=False,
    )  # fmt: skip
    assert recipe_from(config) == expected


def test_config_fields_are_those_of_the_installed_peft() -> None:
    for config in (peft.LoraConfig, peft.IA3Config, peft.VeraConfig):
        theirs = config(inference_mode=True).to_dict()
        theirs["peft_type"] = theirs["peft_type"].value
        ours = RECIPES[theirs["peft_type"]]().config_fields(None, "", {})
        assert {**ours, "peft_version": theirs["peft_version"]} == theirs


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"trainable_token_indices": [0]}, "trainable_token_indices"),
        ({"target_parameters": ["x"]}, "target_parameters"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"megatron_config": {"a": 1}}, "megatron_config"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"use_qalora": True}, "use_qalora"),
        ({"ensure_weight_tying": True}, "ensure_weight_tying"),
        ({"arrow_config": {"top_k": 3}}, "arrow_config"),
        ({"eva_config": {"rho": 2}}, "eva_config"),
        ({"loftq_config": {"bits": 4}}, "loftq_config"),
        ({"use_bdlora": {"x": 1}}, "use_bdlora"),
        ({"a_field_of_tomorrow": 0}, "a_field_of_tomorrow=0, a field it does not know"),
        ({"init_lora_weights": "pissa"}, "'pissa'"),
        ({"init_lora_weights": "eva"}, "'eva'"),
        ({"init_lora_weights": "loftq"}, "'loftq'"),
        ({"peft_type": "IA3", "modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"peft_type": "IA3", "r": 8}, "r=8, a field it does not know"),
        ({"peft_type": "OFT"}, "peft_type=OFT"),
        ({"task_type": "SEQ_CLS"}, "task_type=SEQ_CLS"),
    ],
)
def test_features_refused_by_name(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(UnsupportedError, match=name):
        recipe_from({"peft_type": "LORA", **fields})


def test_features_of_config_objects_refused_by_name() -> None:
    for config, name in [
        (peft.LoraConfig(use_qalora=True), "QA-LoRA"),
        (peft.OFTConfig(), "OFT"),
        (peft.LoKrConfig(), "LOKR"),
    ]:
        with pytest.raises(UnsupportedError, match=name):
            recipe_from(config)
    custom = peft.LoraConfig()
    custom._register_custom_module({torch.nn.Linear: torch.nn.Linear})
    with pytest.raises(UnsupportedError, match="custom modules"):
        recipe_from(custom)


def test_saved_initialisations() -> None:
    """What left the base as it was is plain LoRA once it is saved; what changed the base is not."""
    for init in ("eva", "orthogonal", "mica", "gaussian"):
        assert (
            recipe_from(
                {"peft_type": "LORA", "init_lora_weights": init}, saved=True
            ).init_lora_weights
            == init
        )
    for init in ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga"):
        with pytest.raises(UnsupportedError, match="changed the base"):
            recipe_from({"peft_type": "LORA", "init_lora_weights": init}, saved=True)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"r": 8}, 'no "peft_type"'),
        (5, "int is no PEFT configuration"),
        ("path/to/adapter", "the shorthands are"),
        ({"peft_type": "LORA", "r": "8"}, "r='8'"),
        ({"peft_type": "LORA", "target_modules": 3}, "target_modules=3"),
        ({"peft_type": "LORA", "rank_pattern": [1]}, "rank_pattern"),
        ({"peft_type": "LORA", "init_lora_weights": 3}, "init_lora_weights=3"),
        ({"peft_type": "LORA", "layers_to_transform": "1"}, "layers_to_transform"),
    ],
)
def test_not_configurations(config: object, message: str) -> None:
    with pytest.raises(AdapterError, match=message):
        recipe_from(config)
    with pytest.raises(UnsupportedError, match="'lokr'"):
        recipe_from("lokr")


# ------------------------------------------------------------------------------------ damaged files


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """An adapter with q and v of one layer."""
    recipe = LoraConfig(target_modules=("q", "v"), r=2)
    adapter = new_adapter("x", recipe, {"a.q": (6, 4), "a.v": (6, 4)})
    write_adapter(replace(adapter, base_model_name="some/base"), tmp_path / "saved")
    return tmp_path / "saved"


def edit(path: Path, **fields: Any) -> None:
    file = path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def change(path: Path, remove: str = "", **tensors: torch.Tensor) -> None:
    """Rewrite the weights; a key is given from behind the prefix, with _ for a dot."""
    file = path / "adapter_model.safetensors"
    content = {k: v.clone() for k, v in load_file(file).items() if not remove or remove not in k}
    content |= {f"base_model.model.{k}": v for k, v in tensors.items()}
    save_file(content, file)


def test_missing_files(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="is not there; give the directory"):
        read_adapter(tmp_path / "none", "x")
    with pytest.raises(AdapterError, match="is a file"):
        read_adapter(saved / "adapter_config.json", "x")
    with pytest.raises(AdapterError, match="adapters within: saved"):
        read_adapter(tmp_path, "x")
    weights = saved / "adapter_model.safetensors"
    weights.rename(saved / "adapter_model.bin")
    with pytest.raises(AdapterError, match=r"only pickled weights .*save_pretrained\(OUT\)"):
        read_adapter(saved, "x")
    (saved / "adapter_model.bin").unlink()
    with pytest.raises(AdapterError, match=r"no adapter_model.safetensors; copy it too"):
        read_adapter(saved, "x")
    (saved / "adapter_config.json").rename(saved / "config.json")
    with pytest.raises(AdapterError, match="it is a model, not an adapter"):
        read_adapter(saved, "x")
    (saved / "config.json").unlink()
    with pytest.raises(AdapterError, match=r"has no adapter_config.json; give"):
        read_adapter(saved, "x")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"r": 8,', "damaged at line 1, column"),
        (b"\xff\xfe", "byte 0 is not UTF-8"),
        (b"[1]", "holds a list"),
        (b'{"peft_type": "LORA", "use_qalora": true}', "adapter_config.json: .*use_qalora=True"),
    ],
)
def test_damaged_config(saved: Path, content: bytes, message: str) -> None:
    (saved / "adapter_config.json").write_bytes(content)
    with pytest.raises((AdapterError, UnsupportedError), match=message):
        read_adapter(saved, "x")


@pytest.mark.parametrize("keep", [0, 4, 8, 60, 400, -1])
def test_truncated_weights(saved: Path, keep: int) -> None:
    file = saved / "adapter_model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:keep])
    with pytest.raises(AdapterError, match=r"truncated|damaged"):
        read_adapter(saved, "x")
    file.write_bytes(content + b"more")
    with pytest.raises(AdapterError, match=rf"describes {len(content)} bytes, the file has"):
        read_adapter(saved, "x")
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(AdapterError, match="Git LFS pointer"):
        read_adapter(saved, "x")


@pytest.mark.parametrize(
    ("fields", "remove", "tensors", "error", "message"),
    [
        ({}, "v.lora_A", {}, AdapterError, "no a.v.lora_A.weight, the partner"),
        ({}, "v.lora_B", {}, AdapterError, "no a.v.lora_B.weight, the partner"),
        ({}, "", {"a.v.lora_A.weight": torch.zeros(3, 4)}, AdapterError,
         r"tensors \[3, 4\], \[6, 2\]; expected \[3, 4\], \[6, 3\]"),
        ({}, "", {"a.v.lora_A.weight": torch.zeros(2, 4, 1)}, AdapterError, r"tensors \[2, 4, 1\]"),
        ({"r": 4}, "", {}, AdapterError, "rank 2 .* gives it rank 4"),
        ({"target_modules": ["q"]}, "", {}, AdapterError, "a.v, which .* does not target"),
        ({}, "", {"a.q.lora_magnitude_vector": torch.zeros(6)}, AdapterError, "and DoRA, and"),
        ({}, "", {"a.wte.lora_embedding_A": torch.zeros(2, 6)}, UnsupportedError, "an embedding"),
        ({}, "", {"a.embed_tokens.weight": torch.zeros(2, 6)}, UnsupportedError, "vocabulary"),
        ({}, "", {"a.norm.weight": torch.zeros(2)}, AdapterError, "no LoRA weight"),
        ({}, "", {"a.q.bias": torch.zeros(6)}, AdapterError, 'bias="none"'),
        ({"bias": "lora_only"}, "", {"a.o.bias": torch.zeros(6)}, AdapterError, "lora_only"),
        ({"bias": "all"}, "", {"a.q.base_layer.bias": torch.zeros(5)}, AdapterError, r"\[5\]"),
        ({"lora_bias": True}, "", {}, AdapterError, "gives it .* and lora_bias"),
        ({"use_dora": True}, "", {}, AdapterError, "gives it .* and DoRA"),
        ({}, "", {"a.q.lora_B.bias": torch.zeros(6)}, AdapterError, "and lora_bias, and"),
        ({}, "a.", {"a.q.lora_A.weight": torch.zeros(2, 4, dtype=torch.int8)}, UnsupportedError,
         "is I8"),
        ({"bias": "all"}, "a.", {"a.q.bias": torch.zeros(6)}, AdapterError, "no LoRA weights"),
    ],
)  # fmt: skip
def test_config_and_weights_that_do_not_go_together(
    saved: Path,
    fields: dict[str, Any],
    remove: str,
    tensors: dict[str, torch.Tensor],
    error: type[Exception],
    message: str,
) -> None:
    edit(saved, **fields)
    change(saved, remove, **tensors)
    with pytest.raises(error, match=message):
        read_adapter(saved, "x")


def test_biases_of_old_peft(saved: Path) -> None:
    """Before base_layer, peft stored the bias of an adapted module under its own name."""
    edit(saved, bias="lora_only")
    change(saved, **{"a.q.bias": torch.ones(6)})
    assert read_adapter(saved, "x").biases.keys() == {"a.q"}


def test_another_base(saved: Path) -> None:
    adapter = read_adapter(saved, "mine")
    shapes = {"a.q": (6, 4), "a.v": (6, 4)}
    check_fits(adapter, shapes, "this/base")
    with pytest.raises(AdapterError, match=r"adapts a.v, which is no linear module") as error:
        check_fits(adapter, {"a.q": (6, 4), "a.vv": (6, 4)}, "this/base")
    for part in ("'mine'", "'some/base'", "'this/base'", "did you mean", "another base"):
        assert part in str(error.value)
    with pytest.raises(AdapterError, match=r"tensors \[2, 4\], \[6, 2\] for a.v, .*\[6, 5\] in"):
        check_fits(adapter, {**shapes, "a.v": (6, 5)})
    with pytest.raises(AdapterError, match=r"no weights for 1 of the 3 modules .* b.q"):
        check_fits(adapter, {**shapes, "b.q": (6, 4)})
    edit(saved, bias="lora_only")
    change(saved, **{"a.q.base_layer.bias": torch.ones(6)})
    adapter = read_adapter(saved, "mine")
    check_fits(adapter, shapes)


# ------------------------------------------------------------------------------------------ saving


def snapshot(directory: Path) -> dict[str, bytes]:
    return {
        str(f.relative_to(directory)): f.read_bytes() for f in directory.rglob("*") if f.is_file()
    }


@pytest.mark.parametrize("writer", ["save_file", "os.fsync"])
def test_a_full_disk_leaves_the_old_files(
    saved: Path, writer: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = snapshot(tmp_path)
    adapter = read_adapter(saved, "x")
    other = new_adapter("x", LoraConfig(target_modules=("q",)), {"a.q": (6, 4)}, seed=1)

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"pcg.peft.writer.{writer}", full)
    with pytest.raises(AdapterError, match="No space left on device; the files there are as they"):
        write_adapter(other, saved)
    with pytest.raises(AdapterError, match="No space left on device; nothing was left there"):
        write_adapter(other, tmp_path / "new")
    assert snapshot(tmp_path) == before
    monkeypatch.undo()
    assert torch.equal(read_adapter(saved, "x").weights["a.q"].a, adapter.weights["a.q"].a)


def test_a_real_write_that_breaks_off(saved: Path, tmp_path: Path) -> None:
    """The kernel refuses to write more than 64 KiB to a file."""
    before = snapshot(tmp_path)
    recipe = LoraConfig(target_modules=("q",))
    big = new_adapter("x", recipe, {"a.q": (1 << 14, 1 << 14)})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(AdapterError, match="cannot be saved in"):
            write_adapter(big, saved)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert snapshot(tmp_path) == before


def test_saving_again(saved: Path, tmp_path: Path) -> None:
    """Mapped tensors of the old file stay what they were; other files and an equal config stay."""
    (saved / "optimizer.pt").write_bytes(b"state")
    adapter = read_adapter(saved, "x")
    before = {path: weights.a.clone() for path, weights in adapter.weights.items()}
    config = (saved / "adapter_config.json").stat()
    recipe = adapter.recipe
    other = new_adapter("x", recipe, {"a.q": (6, 4), "a.v": (6, 4)}, seed=5)
    other = replace(other, base_model_name="some/base")
    write_adapter(other, saved)
    assert (saved / "adapter_config.json").stat().st_ino == config.st_ino
    assert torch.equal(adapter.weights["a.q"].a, before["a.q"])
    assert torch.equal(read_adapter(saved, "x").weights["a.q"].a, other.weights["a.q"].a)
    names = ["adapter_config.json", "adapter_model.safetensors", "optimizer.pt"]
    assert sorted(file.name for file in saved.iterdir()) == names
    # An adapter may be saved over the very file that its tensors are mapped from.
    write_adapter(adapter, saved)
    assert torch.equal(read_adapter(saved, "x").weights["a.q"].a, before["a.q"])
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "target")
    write_adapter(adapter, link)
    assert link.is_symlink()
    assert (tmp_path / "target" / "adapter_config.json").is_file()


def test_a_failing_second_rename_is_told(
    saved: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    replace = Path.replace

    def refuse_config(self: Path, target: Path) -> Path:
        if self.name == "adapter_config.json":
            raise PermissionError(13, "Permission denied")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", refuse_config)
    other = new_adapter("x", LoraConfig(target_modules=("q",)), {"a.q": (6, 4)})
    with pytest.raises(AdapterError, match=r"adapter_config.json is not: save again"):
        write_adapter(other, saved)
    assert adapter_writer.WEIGHTS in snapshot(saved)


def test_weights_that_are_not_of_the_recipe_are_not_saved(tmp_path: Path) -> None:
    recipe = LoraConfig(target_modules=("q",), r=2, lora_alpha=4)
    a, b = torch.zeros(2, 4), torch.zeros(6, 2)
    with pytest.raises(AdapterError, match=r"scale 3 at a.q, its recipe gives .* scale 2"):
        write_adapter(Adapter("x", recipe, {"a.q": LoraWeights(a, b, 3.0)}), tmp_path / "x")
    with pytest.raises(AdapterError, match=r"a.v, which its recipe does not target"):
        write_adapter(Adapter("x", recipe, {"a.v": LoraWeights(a, b, 2.0)}), tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("mine")
    adapter = new_adapter("x", LoraConfig(target_modules=("q",)), {"a.q": (6, 4)})
    with pytest.raises(AdapterError, match="cannot be saved in"):
        write_adapter(adapter, tmp_path / "x")
    assert (tmp_path / "x").read_text() == "mine"
    shutil.rmtree(tmp_path, ignore_errors=True)
