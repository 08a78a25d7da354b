"""Checkpoints in weight formats: written by pcg, and read by transformers and by pcg."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

import pcg
from pcg.errors import PcgError, UnsupportedError, WeightsError
from pcg.formats import registry
from pcg.formats.format import compressed_settings
from pcg.formats.registry import FORMATS, stored_format
from tests.formats.test_formats import dequantized, matrix, stored_matrix
from tests.support import oracle
from tests.support.command_line import ROOT, assert_one_error, output_of, run
from tests.support.families import BY_NAME
from tests.support.peft_cases import CONFIGS, check_batch, wrap

WRITTEN = [name for name, format_ in FORMATS.items() if format_.library]
NOT_WRITTEN = [name for name in FORMATS if name not in WRITTEN]
IDS = list(range(3, 60))


def model_of(family: str) -> Any:
    config = BY_NAME[family].config(2)
    sizes = {"gpt2": {"n_embd": 128, "n_inner": 256}}
    other = {"hidden_size": 128, "intermediate_size": 384, "head_dim": 32, "ffn_dim": 256}
    return oracle.random_model({**config, **sizes.get(family, other)})


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model = model_of("llama-biases")
    directory = tmp_path_factory.mktemp("float")
    oracle.save_model(model, directory)
    return model, directory


def is_loaded_by_transformers(directory: Path) -> bool:
    """Return False for compressed-tensors before transformers itself dequantizes them."""
    from transformers.integrations import compressed_tensors

    settings = json.loads((directory / "config.json").read_text())["quantization_config"]
    is_compressed = settings["quant_method"] == "compressed-tensors"
    return not is_compressed or hasattr(compressed_tensors, "CompressedTensorsDequantize")


def loaded_by_transformers(directory: Path) -> Any:
    """A checkpoint that transformers runs on CPUs; compressed-tensors dequantizes on loading."""
    import transformers

    config = json.loads((directory / "config.json").read_text())
    is_compressed = config["quantization_config"]["quant_method"] == "compressed-tensors"
    options: dict[str, Any] = {}
    if is_compressed:
        options["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
    if config.get("attn_logit_softcapping"):
        options["attn_implementation"] = "eager"  # as `oracle.random_model`
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, **options
        )
    for module in model.modules():
        # In evaluation, bitsandbytes multiplies in fewer bits.
        module.train(type(module).__module__.startswith("bitsandbytes."))
    return model


def error_of(executor: Any, model: Any) -> float:
    return oracle.relative_error(executor.logits([IDS])[0], oracle.logits(model, IDS))


@pytest.mark.parametrize("name", WRITTEN)
@given(rows=st.integers(1, 300), blocks=st.integers(1, 6), scale=st.floats(1e-3, 1e3))
def test_written_parts_are_read_as_they_were(
    name: str, rows: int, blocks: int, scale: float
) -> None:
    format_, columns = FORMATS[name], 128 * blocks
    parts = format_.quantize(scale * matrix(rows, columns, seed=rows))
    written = format_.write(parts, torch.float32)
    settings = format_.settings("float32", [])
    read = format_.read(stored_matrix(written, rows, columns, **settings))
    assert read is not None
    assert (read.rows, read.columns, read.facts) == (rows, columns, parts.facts)
    assert read.tensors.keys() == parts.tensors.keys()
    for part, tensor in parts.tensors.items():
        assert read[part].dtype is tensor.dtype
        assert torch.equal(read[part].view(torch.uint8), tensor.view(torch.uint8))


IN_SHORT = ("nf4", "int8_weight", "int4_g64", "fp8", "fp8_block", "mxfp4", "nvfp4")
"""Formats of each file, whose others run in the slow run alone."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in IN_SHORT else pytest.mark.slow) for n in WRITTEN]
)
def test_written_checkpoints_run_in_transformers_and_as_quantization_on_load(
    base: tuple[Any, Path], name: str, tmp_path: Path
) -> None:
    model, directory = base
    folder = pcg.quantize(directory, name, tmp_path / "quantized")
    executor = pcg.compile(folder)
    loaded = pcg.compile(directory, quantization=name)
    assert torch.equal(executor.logits([IDS])[0], loaded.logits([IDS])[0])
    decoded = pcg.compile(folder, quantization="none")
    assert all(p.type.dtype == "f32" for _, p in decoded.state.weight_store.frozen())
    assert error_of(decoded, dequantized(model, name)) < 1e-5
    is_loaded = is_loaded_by_transformers(folder)
    if name in ("fp8_block", "nvfp4") or not is_loaded:
        # transformers multiplies fp8 on GPUs alone, and rounds the scales of nvfp4 to bf16.
        assert error_of(executor, dequantized(model, name)) < 1e-5
    if name != "fp8_block" and is_loaded:
        error = error_of(executor, loaded_by_transformers(folder))
        assert error < (0.02 if name == "nvfp4" else 1e-5)


@pytest.mark.parametrize("name", ["nf4", "int8_weight"])
def test_gpt2_has_the_layout_of_bitsandbytes(name: str, tmp_path: Path) -> None:
    oracle.save_model(model_of("gpt2"), tmp_path / "float")
    folder = pcg.quantize(tmp_path / "float", name, tmp_path / "quantized")
    model = loaded_by_transformers(folder)
    for quantization in (None, "none"):
        assert error_of(pcg.compile(folder, quantization=quantization), model) < 1e-5


def test_a_model_is_written_in_several_files_with_its_tokenizer(
    base: tuple[Any, Path], tmp_path: Path
) -> None:
    directory = shutil.copytree(base[1], tmp_path / "float")
    for name in ("tokenizer.json", "generation_config.json", "chat_template.jinja"):
        if not (directory / name).exists():
            (directory / name).write_text("{}")
    (tmp_path / "quantized").mkdir()
    printed = output_of(
        "quantize", directory, "--format", "nf4", "-o", tmp_path / "quantized",
        "--max-shard-size", "100KiB", "--json",
    )  # fmt: skip
    report = json.loads(printed)
    folder = Path(report["output"])
    assert len(report["files"]) > 2
    assert max(report["files"].values()) < 150_000
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    for file, size_bytes in report["files"].items():
        assert (folder / file).stat().st_size == size_bytes
        with safe_open(folder / file, framework="pt") as opened:
            assert set(opened.keys()) == {
                name for name, place in index["weight_map"].items() if place == file
            }
    assert (folder / "tokenizer.json").read_bytes() == (directory / "tokenizer.json").read_bytes()
    assert (folder / "generation_config.json").exists()
    loaded_by_transformers(folder)
    for path in folder.iterdir():
        assert path.suffix != ".part"


def save_shards(directory: Path, layers: int) -> int:
    """Write a Llama with a file for each layer; return the bytes of all."""
    wide, inner = 1024, 2816
    sizes = {"hidden_size": wide, "intermediate_size": inner, "num_hidden_layers": layers}
    config = {**BY_NAME["llama3"].config(layers), **sizes, "head_dim": 64}
    config |= {"num_attention_heads": 16, "num_key_value_heads": 16}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    square, up, norm = torch.randn(wide, wide), torch.randn(inner, wide), torch.ones(wide)
    of_layer = {f"self_attn.{kind}_proj.weight": square for kind in "qkvo"}
    of_layer |= {f"mlp.{kind}_proj.weight": up for kind in ("gate", "up")}
    of_layer["mlp.down_proj.weight"] = up.t()
    of_layer |= {f"{kind}_layernorm.weight": norm for kind in ("input", "post_attention")}
    table = torch.randn(config["vocab_size"], wide)
    outside = {"model.embed_tokens": table, "lm_head": table, "model.norm": norm}
    files = [{f"{name}.weight": tensor for name, tensor in outside.items()}]
    files += [
        {f"model.layers.{layer}.{name}": tensor for name, tensor in of_layer.items()}
        for layer in range(layers)
    ]
    weight_map = {}
    for number, tensors in enumerate(files, 1):
        path = directory / f"model-{number:05}-of-{len(files):05}.safetensors"
        weight_map |= dict.fromkeys(tensors, path.name)
        save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, path)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def test_memory_never_holds_the_whole_float_model(tmp_path: Path) -> None:
    """Mapped files count, too; the first call has loaded what any model needs."""
    code = (
        "import pathlib, sys, pcg\n"
        "def peak(): return int(pathlib.Path('/proc/self/status').read_text()"
        ".split('VmHWM:')[1].split()[0])\n"
        "small, large = map(pathlib.Path, sys.argv[1:])\n"
        "pcg.quantize(small, 'int8_weight', f'{small}-8', max_shard_size='16MB')\n"
        "before = peak()\n"
        "pcg.quantize(large, 'int8_weight', f'{large}-8', max_shard_size='16MB')\n"
        "print(1024 * (peak() - before))"
    )
    folders = tmp_path / "small", tmp_path / "large"
    _, size_bytes = (
        save_shards(folder, layers) for folder, layers in ((folders[0], 1), (folders[1], 6))
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MALLOC_MMAP_THRESHOLD_": "131072"}
    ended = subprocess.run(
        [sys.executable, "-c", code, *map(str, folders)],
        check=True, capture_output=True, env=environment,
    )  # fmt: skip
    shutil.rmtree(folders[1])
    assert size_bytes > 300e6
    assert int(ended.stdout) < size_bytes / 3


@pytest.mark.parametrize("name", NOT_WRITTEN)
def test_formats_without_a_layout_are_refused(
    base: tuple[Any, Path], name: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match=f"reads no checkpoint of {name}; use one of nf4"):
        pcg.quantize(base[1], name, tmp_path / "quantized")
    assert not any(tmp_path.iterdir())


def test_refusals_come_before_work(base: tuple[Any, Path], tmp_path: Path) -> None:
    _, directory = base
    full = tmp_path / "full"
    full.mkdir()
    (full / "notes.txt").write_text("mine")
    result = run("quantize", directory, "--format", "nf4", "-o", full)
    assert_one_error(result, "is not empty; give a new folder")
    (tmp_path / "file").write_text("")
    for arguments, fix in (
        ({"output": tmp_path / "file"}, "is a file; give another directory"),
        ({"format": "nf5"}, "use one of nf4"),
        ({"max_shard_size": "many"}, "use a size with a unit"),
        ({"model": tmp_path / "none"}, "give a directory with a config.json"),
        ({"model": tmp_path}, "config.json"),
    ):
        given_all: dict[str, Any] = {
            "model": directory, "format": "nf4", "output": tmp_path / "new", **arguments,
        }  # fmt: skip
        with pytest.raises(PcgError, match=fix):
            pcg.quantize(**given_all)
        assert not (tmp_path / "new").exists()
    folder = pcg.quantize(directory, "nf4", tmp_path / "new")
    with pytest.raises(UnsupportedError, match="already quantized, to nf4; give the float"):
        pcg.quantize(folder, "fp8", tmp_path / "again")
    with pytest.raises(WeightsError, match="is not empty"):
        pcg.quantize(directory, "nf4", folder)


def test_a_conv1d_is_refused_by_libraries_that_skip_it(tmp_path: Path) -> None:
    oracle.save_model(model_of("gpt2"), tmp_path / "float")
    with pytest.raises(UnsupportedError, match=r"Conv1D.*use nf4, fp4 or int8_weight"):
        pcg.quantize(tmp_path / "float", "fp8", tmp_path / "quantized")


SKIPPING: list[tuple[str, list[str] | None]] = [
    ("llama-biases", ["lm_head", "model.layers.1.mlp"]),
    ("qwen2", ["lm_head", "layers.0.self_attn.v_proj", "down_proj"]),
    ("gemma2", None),
    ("gpt_neox", ["embed_out", "gpt_neox.layers.1"]),
    ("opt", ["lm_head", "fc1"]),
]
"""Families, and modules that a checkpoint of bitsandbytes has in floating point."""


@pytest.mark.parametrize(("family", "skipped"), SKIPPING)
def test_modules_are_skipped_as_in_transformers(
    family: str, skipped: list[str] | None, tmp_path: Path
) -> None:
    import transformers

    oracle.save_model(model_of(family), tmp_path / "float")
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_skip_modules=skipped
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stored = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "float", quantization_config=config, dtype=torch.float32
        )
    oracle.save_model(stored, tmp_path / "stored")
    executor = pcg.compile(tmp_path / "stored")
    assert error_of(executor, loaded_by_transformers(tmp_path / "stored")) < 1e-5


@pytest.mark.parametrize("ignored", [["lm_head"], ["re:.*layers.1.*", "re:lm_head"]])
def test_modules_are_ignored_as_in_compressed_tensors(
    base: tuple[Any, Path], ignored: list[str], tmp_path: Path
) -> None:
    from compressed_tensors.utils.match import match_named_modules

    model, _ = base
    stored = stored_format({"quantization_config": FORMATS["fp8"].settings("float32", ignored)})
    assert stored is not None
    expected = {name for name, _ in match_named_modules(model, ["Linear"], ignored)}
    linear = {n for n, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert {n for n in linear if stored.of(n, n == "lm_head", "layers" in n)} == expected


def test_declarations_that_the_files_contradict_are_refused(
    base: tuple[Any, Path], tmp_path: Path
) -> None:
    folder = pcg.quantize(base[1], "nf4", tmp_path / "quantized")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    settings = config["quantization_config"]
    path.write_text(json.dumps({**config, "quantization_config": {
        **settings, "llm_int8_skip_modules": ["lm_head", "model.layers.1.mlp.up_proj"],
    }}))  # fmt: skip
    with pytest.raises(WeightsError, match=r"layers.1.mlp.up_proj.weight.* stored quantized"):
        pcg.compile(folder)
    path.write_text(json.dumps({**config, "quantization_config": {
        **settings, "llm_int8_skip_modules": [],
    }}))  # fmt: skip
    with pytest.raises(WeightsError, match=r"lm_head.weight .*should be stored as nf4.*F32"):
        pcg.compile(folder)


@pytest.mark.parametrize(
    ("method", "settings", "named"),
    [
        ("gptq", {"bits": 3}, "3 bits"),
        ("gptq", {"modules_in_block_to_quantize": [["q_proj"]]}, "modules_in_block_to_quantize"),
        ("gptq", {"dynamic": {"-:.*down.*": {}}}, "dynamic"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
        ("gptq", {"lm_head": True}, "lm_head=True"),
        ("awq", {"version": "gemv"}, "version='gemv'"),
        ("awq", {"zero_point": False}, "zero_point=False"),
        ("awq", {"model_type": "falcon"}, "activations of falcon"),
        ("fp8", {"weight_block_size": [64, 64]}, "weight_block_size"),
        ("fp8", {"weight_block_size": [128, 128], "scale_fmt": "ue8m0"}, "scale_fmt='ue8m0'"),
        ("compressed-tensors", {"transform_config": {"a": 1}}, "transform_config"),
        ("bitsandbytes", {"load_in_4bit": True, "llm_int8_skip_modules": ["*x"]}, "no pattern"),
    ],
)
def test_settings_that_are_not_read_are_named(
    method: str, settings: dict[str, Any], named: str
) -> None:
    given_all = {"quant_method": method, "bits": 4, "group_size": 128, **settings}
    model_type = given_all.pop("model_type", "llama")
    with pytest.raises(UnsupportedError, match=re.escape(named)):
        stored_format({"model_type": model_type, "quantization_config": given_all})


def test_rounding_that_pcg_leaves_out_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Of activations, keys and values: weights alone are in a format."""
    settings = compressed_settings("float-quantized", {"num_bits": 8, "strategy": "channel"}, ())
    config = {"quantization_config": {"quant_method": "compressed-tensors", **settings}}
    group = settings["config_groups"]["group_0"]
    registry._note_exact.cache_clear()
    with caplog.at_level("WARNING", "pcg.formats"):
        assert stored_format(config).name == "fp8"
        assert not caplog.records
        group["input_activations"] = {"num_bits": 8, "dynamic": True, "strategy": "token"}
        settings["kv_cache_scheme"] = {"num_bits": 8}
        for _ in range(2):
            assert stored_format({"quantization_config": dict(settings)}).name == "fp8"
    (record,) = caplog.records
    assert "inputs and keys and values" in record.getMessage()


def test_an_adapter_trains_over_layers_that_are_quantized_in_part(
    base: tuple[Any, Path], tmp_path: Path
) -> None:
    import transformers

    model, directory = base
    skipped = ["lm_head", "layers.0.self_attn.v_proj", "model.layers.1.mlp"]
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_skip_modules=skipped
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stored = transformers.AutoModelForCausalLM.from_pretrained(
            directory, quantization_config=config, dtype=torch.float32
        )
    oracle.save_model(stored, tmp_path / "stored")
    expected = copy.deepcopy(model)
    with torch.no_grad():
        for name, module in stored.named_modules():
            if type(module).__module__.startswith("bitsandbytes."):
                weight = bnb.dequantize_4bit(module.weight.data, module.weight.quant_state)
                expected.get_submodule(name).weight.copy_(weight)
    models: dict[str | None, Any] = {None: expected}
    for method in ("dora", "lora"):
        models[method] = wrap(expected, CONFIGS["llama-biases"][method])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            models[method].save_pretrained(tmp_path / method, save_embedding_layers=False)
    adapters = {method: str(tmp_path / method) for method in ("dora", "lora")}
    executor = pcg.compile(tmp_path / "stored", adapters)
    check_batch(executor, models, "lora")


def test_the_documents_table_has_every_format() -> None:
    text = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|`(\w+)`\|([\d.]+)\|([\w-]+)\|$", text, re.MULTILINE)
    assert {name: (bits, layout) for name, bits, layout in rows} == {
        name: (
            f"{format_.size_bytes(4096, 4096) * 8 / 4096**2:.3f}",
            format_.library or "none",
        )
        for name, format_ in FORMATS.items()
        if not name.startswith("int4_") or name in ("int4_g128", "int4_g64", "int4_g32", "int4_row")
    }


def test_code_in_the_documents_section_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "docs/models.md").read_text(encoding="utf-8").partition("## Quantized bases")[2]
    code = text.partition("```python\n")[2].partition("```")[0]
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"pcg": pcg}
    exec(compile(code, "models.md", "exec"), names)
    loaded = pcg.compile("examples/checkpoint", quantization="int8_weight")
    assert torch.equal(names["executor"].logits([IDS])[0], loaded.logits([IDS])[0])
