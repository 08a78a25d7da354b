"""Experts in weight formats: checkpoints that transformers reads, quantization on load, ranks."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import pcg
from pcg.compiler import compile_program, make_executor
from pcg.errors import ParallelError, PcgError, UnsupportedError, WeightsError
from pcg.formats.registry import FORMATS
from pcg.peft.lora import LoraConfig
from pcg.runtime.data.example import Example
from pcg.runtime.executor import Executor
from pcg.runtime.model.base_weights import WeightStore
from pcg.runtime.model.gguf_weights import open_weights
from pcg.runtime.model.weights import StateDictCheckpoint, Weights
from pcg.source import resolve
from tests.formats.test_formats import (
    EXACT,
    IN_SHORT,
    QUANTIZES,
    packed_int32,
    with_stored_weights,
)
from tests.support import compiled, oracle
from tests.support.families import BY_NAME
from tests.support.prompts import TOLERANCE, prompts
from tests.support.ranked import fill, work, worst_error
from tests.support.threads import run_ranks, tp_mesh

IDS = list(range(3, 40))
SIZES = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "head_dim": 32}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def config_of(family: str) -> dict[str, Any]:
    return {**BY_NAME[family].config(2), **SIZES}


def written(
    folder: Path, settings: Mapping[str, Any], tensors: Iterator[tuple[str, Tensor]]
) -> Path:
    """Write other tensors and settings of quantization into the folder of a float checkpoint."""
    save_file({name: tensor.contiguous() for name, tensor in tensors}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = dict(settings)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def check_gradients(executor: Executor, wrapped: Any) -> None:
    sequences = prompts((9, 5))
    runner = executor.training_runner("mine")
    examples = [Example(s, s) for s in sequences]
    loss = runner.forward_backward(examples, runner.count_targets(examples))
    expected_loss, expected = oracle.loss_and_gradients(wrapped, sequences)
    assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
    assert runner.parameters.keys() == expected.keys()
    for name, parameter in runner.parameters.items():
        error = (parameter.grad - expected[name]).norm() / expected[name].norm()
        assert error < TOLERANCE, name


def packed_gpt_oss(folder: Path) -> Path:
    """A gpt-oss whose experts are random blocks of mxfp4, in the layout of OpenAI's release."""
    oracle.save_model(oracle.random_model(config_of("gpt_oss")), folder)
    generator = torch.Generator().manual_seed(0)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in load_file(folder / "model.safetensors").items():
            if not name.endswith(("gate_up_proj", "down_proj")):
                yield name, tensor
                continue
            experts, columns, rows = tensor.shape
            size = experts, rows, columns // 32
            blocks = torch.randint(0, 256, (*size, 16), generator=generator)
            yield f"{name}_blocks", blocks.to(torch.uint8)
            scales = torch.randint(118, 123, size, generator=generator)
            yield f"{name}_scales", scales.to(torch.uint8)

    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"]
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": [*skipped, "lm_head"]}
    return written(folder, settings, tensors())


def test_gpt_oss_runs_and_trains_in_its_blocks(tmp_path: Path) -> None:
    folder = packed_gpt_oss(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            quantization_config=transformers.Mxfp4Config(dequantize=True),
        ).eval()
    wrapped = oracle.with_adapter(model, ["q_proj", "v_proj"], rank=3, parameters=EXPERTS)
    oracle.save(wrapped, tmp_path / "adapter")
    executor = pcg.compile(folder, {"mine": str(tmp_path / "adapter")}, dtype="float32")
    store = executor.state.weight_store
    state, experts = model.state_dict(), 0
    for name, parameter in store.frozen():
        if parameter.type.dtype == "mxfp4":
            assert torch.equal(store.whole(name, parameter), state[name].mT)
            experts += parameter.type.elements
    for adapter, expected in ((None, model), ("mine", wrapped)):
        found = executor.logits([IDS], adapter)[0]
        assert oracle.relative_error(found, oracle.logits(expected, IDS)) < TOLERANCE
    check_gradients(executor, wrapped)
    report, whole = (pcg.explain(m, None) for m in (folder, config_of("gpt_oss")))
    saved = whole.memory_bytes["weights"] - report.memory_bytes["weights"]
    assert saved == int(experts) * (4 - 4.25 / 8)
    assert store.size_bytes == report.memory_bytes["weights"]


@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("gpt_oss", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in IN_SHORT else pytest.mark.slow) for n in QUANTIZES]
)
def test_float_experts_are_quantized_on_loading(name: str, family: str) -> None:
    """int8 rounds the inputs of products, too, so that a token may choose other experts."""
    every = {} if name in EXACT else {"num_experts_per_tok": 4}
    config = {**config_of(family), **every}
    model = oracle.random_model(config)
    executor = compiled.executor(model, quantization=name, dtype="float32")
    (found,) = executor.logits([IDS])
    expected = oracle.logits(with_stored_weights(model, executor), IDS)
    tolerance = TOLERANCE if name in EXACT else 0.05
    assert oracle.relative_error(found, expected) < tolerance
    assert oracle.relative_error(found, oracle.logits(model, IDS)) > 10 * TOLERANCE
    predicted = pcg.explain(config, None, quantization=name, dtype="float32")
    if name != "int8":  # which keeps the sums of rows, too
        assert executor.state.weight_store.size_bytes == predicted.memory_bytes["weights"]


def stored_by_expert(folder: Path, name: str, library: str) -> Path:
    """A Qwen3-MoE whose matrices, the experts' one by one, are in a format of a library."""
    oracle.save_model(oracle.random_model(config_of("qwen3_moe")), folder)
    format_ = FORMATS[name]
    settings = format_.settings("float32", ["lm_head", "re:.*mlp.gate$"])
    if library == "fp8":
        settings["modules_to_not_convert"] = ["lm_head", "mlp.gate"]

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for key, weight in load_file(folder / "model.safetensors").items():
            if not key.endswith("_proj.weight"):
                yield key, weight
                continue
            parts = format_.quantize(weight)
            if name.startswith("int4"):  # transformers reads experts without zero points
                parts["zeros"].fill_(8)
            for suffix, tensor in format_.write(parts, torch.float32).items():
                if suffix != "weight_zero_point":
                    yield f"{key.removesuffix('weight')}{suffix}", tensor

    for group in settings.get("config_groups", {}).values():
        group["weights"]["symmetric"] = True
    return written(folder, settings, tensors())


LOADING = {
    "compressed-tensors": lambda: transformers.CompressedTensorsConfig(dequantize=True),
    "fp8": lambda: transformers.FineGrainedFP8Config(dequantize=True),
}


@pytest.mark.parametrize(
    ("name", "library"),
    [("fp8", "compressed-tensors"), ("int4_g64", "compressed-tensors"), ("fp8_block", "fp8")],
)
def test_checkpoints_of_experts_one_by_one(name: str, library: str, tmp_path: Path) -> None:
    folder = stored_by_expert(tmp_path, name, library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, quantization_config=LOADING[library]()
        ).eval()
    model.float()  # Experts of 4 bits stay in the dtype of their scales.
    wrapped = oracle.with_adapter(model, ["q_proj"], rank=2, parameters=EXPERTS)
    oracle.save(wrapped, tmp_path / "adapter")
    executor = pcg.compile(folder, {"mine": str(tmp_path / "adapter")}, dtype="float32")
    assert {
        str(parameter.type)
        for _, parameter in executor.state.weight_store.frozen()
        if len(parameter.type.dims) == 3
    } == {f"{name}[4, 256, 128]", f"{name}[4, 128, 128]"}
    for adapter, expected in ((None, model), ("mine", wrapped)):
        found = executor.logits([IDS], adapter)[0]
        assert oracle.relative_error(found, oracle.logits(expected, IDS)) < TOLERANCE
    check_gradients(executor, wrapped)
    for quantization in (None, "none"):
        options = {"dtype": "float32", "quantization": quantization}
        executor = pcg.compile(folder, **options)
        (found,) = executor.logits([IDS])
        assert oracle.relative_error(found, oracle.logits(model, IDS)) < TOLERANCE
        report = pcg.explain(folder, None, **options)
        assert executor.state.weight_store.size_bytes == report.memory_bytes["weights"]


@pytest.mark.slow
def test_experts_of_gptq(tmp_path: Path) -> None:
    """transformers reads the matrices as GPTQ's are to be read, in floating point."""
    oracle.save_model(oracle.random_model(config_of("qwen3_moe")), tmp_path)
    format_, floats = FORMATS["int4_g64"], {}

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for key, weight in load_file(tmp_path / "model.safetensors").items():
            if not key.endswith("_proj.weight"):
                yield key, weight
                continue
            parts, module = format_.quantize(weight), key.removesuffix(".weight")
            floats[key] = format_.whole(parts, torch.float32)
            codes = torch.stack([parts["codes"] & 15, parts["codes"] >> 4], -1).flatten(1)
            yield f"{module}.qweight", packed_int32(codes).t()
            yield f"{module}.qzeros", packed_int32(parts["zeros"].t())
            yield f"{module}.scales", parts["scales"].t()
            yield f"{module}.g_idx", torch.arange(codes.shape[1], dtype=torch.int32) // 64

    settings = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False}
    written(tmp_path, {**settings, "checkpoint_format": "gptq_v2"}, tensors())
    executor = pcg.compile(tmp_path, dtype="float32")
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    del config.quantization_config
    stored = load_file(tmp_path / "model.safetensors")
    whole = {key: t for key, t in stored.items() if key.endswith(".weight")} | floats
    written(tmp_path, {}, iter(whole.items()))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, config=config, dtype=torch.float32
    )
    (found,) = executor.logits([IDS])
    assert oracle.relative_error(found, oracle.logits(model, IDS)) < TOLERANCE


def rewritten(folder: Path, change: Any) -> Path:
    """Change the tensors of a checkpoint, a dict by name."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return folder


def test_damaged_checkpoints_are_refused_by_name(tmp_path: Path) -> None:
    stored_by_expert(tmp_path, "fp8", "compressed-tensors")
    name = "model.layers.1.mlp.experts.2.up_proj.weight_scale"
    (scale,) = [t for key, t in load_file(tmp_path / "model.safetensors").items() if key == name]
    rewritten(tmp_path, lambda tensors: tensors.update({name: scale[:7].clone()}))
    with pytest.raises(PcgError, match=r"layers.1.mlp.experts.2.up_proj .* in fp8"):
        pcg.compile(tmp_path)
    rewritten(tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(WeightsError, match=r"layers.1.mlp.experts.gate_up_proj .* as fp8.*missing"):
        pcg.compile(tmp_path)


def test_experts_of_bitsandbytes_are_refused(tmp_path: Path) -> None:
    """transformers 5 leaves them in floating point, and transformers 4 quantized them."""
    oracle.save_model(oracle.random_model(config_of("qwen3_moe")), tmp_path / "float")
    with pytest.raises(
        UnsupportedError, match=r"experts.gate_up_proj has experts.*quantization='nf4'"
    ):
        pcg.quantize(tmp_path / "float", "nf4", tmp_path / "quantized")
    tmp_path /= "stored"
    stored_by_expert(tmp_path, "nf4", "bitsandbytes")
    with pytest.raises(WeightsError, match=r"experts.gate_up_proj.* use the float checkpoint"):
        pcg.compile(tmp_path)


@pytest.mark.parametrize("name", ["", "fp8"])
def test_a_rank_reads_its_experts_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name:
        stored_by_expert(tmp_path, name, "compressed-tensors")
    else:
        oracle.save_model(oracle.random_model(config_of("qwen3_moe")), tmp_path)
    source, taken, take = resolve(str(tmp_path), weights=True), set[int](), Weights._take
    program = compile_program(source.config, tp=2, ep=2, dtype="float32")
    weights = open_weights(source, program)

    def watched(self: Weights, name: str, ranges: Any = None) -> Tensor:
        taken.update(map(int, re.findall(r"experts\.(\d+)\.", name)))
        return take(self, name, ranges)

    monkeypatch.setattr(Weights, "_take", watched)
    for rank, experts in enumerate(({0, 1}, {2, 3})):
        ranks: Any = SimpleNamespace(rank=rank, size=2)
        WeightStore(program, weights, torch.device("cpu"), ranks).bind(program.serving.model)
        assert taken == experts
        taken.clear()


@pytest.mark.slow
def test_experts_over_ranks() -> None:
    config = {**config_of("qwen3_moe"), "head_dim": 64}
    recipes = {
        "a": LoraConfig(r=2, target_modules=["q_proj"]),
        "b": LoraConfig(r=3, target_modules=(), target_parameters=tuple(EXPERTS)),
    }
    state = oracle.random_model(config).state_dict()

    def outcome(degree: int, ranks: Any = None, **options: Any) -> tuple[Any, int]:
        options |= {"quantization": "nf4", "dtype": "float32"}
        program = compile_program(config, recipes, tp=degree, **options)
        weights = StateDictCheckpoint(state, program.base_prefix)
        mesh = None if ranks is None else tp_mesh(ranks)
        executor = make_executor(program, weights, recipes, None, "cpu", mesh)
        for adapter in executor.adapters.values():
            fill(adapter.tensors)
            executor.refresh_adapter(adapter.name)
        return work(executor), executor.state.weight_store.size_bytes

    expected, _ = outcome(1)
    report = pcg.explain(config, None, tp=2, quantization="nf4", dtype="float32")
    for found, held in run_ranks(2, lambda ranks: outcome(2, ranks)):
        assert worst_error(found, expected) < TOLERANCE
        # A rank has all nested scales, and not its share of them.
        assert held == pytest.approx(report.memory_bytes["weights"], rel=2e-3)
    with pytest.raises(ParallelError, match=r"experts.* inside a block of 64 .*fit its 128"):
        run_ranks(4, lambda ranks: outcome(4, ranks, ep=1))
    report = pcg.explain(config, None, tp=4, quantization="nf4", dtype="float32")
    for found, held in run_ranks(4, lambda ranks: outcome(4, ranks)):  # whole experts
        assert worst_error(found, expected) < TOLERANCE
        assert held == pytest.approx(report.memory_bytes["weights"], rel=2e-3)
