"""Quantized bases over tensor-parallel ranks, in programs on disk, and at a base executor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import pcg
import pcg.compiler as compiler
from pcg.errors import ParallelError
from pcg.explain import explain as explaining
from pcg.formats import native
from pcg.ir.program.folder import save_program
from pcg.peft.lora import LoraConfig
from pcg.plan import plan as planning
from pcg.runtime.executor import Executor
from pcg.runtime.model.base_weights import base_digest
from pcg.runtime.model.weights import StateDictCheckpoint
from pcg.split.base.base_executor import BaseExecutor
from pcg.split.base.serve_base import executor_of
from tests.support import oracle
from tests.support.families import BY_NAME
from tests.support.prompts import prompts
from tests.support.ranked import fill, work, worst_error
from tests.support.split_base import results, running_base
from tests.support.threads import run_ranks, tp_mesh

RECIPES = {
    "a": LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"),
    "b": LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "down_proj"]),
}
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 4}


def config() -> dict[str, Any]:
    return {**BY_NAME["llama-biases"].config(2), **SIZES, "tie_word_embeddings": True}


def make_executor(name: str, degree: int = 1, ranks: Any = None) -> Executor:
    """An executor over a random model whose weights are quantized on load."""
    program = compiler.compile_program(
        config(), RECIPES, tp=degree, quantization=name, dtype="float32"
    )
    state = oracle.random_model(config()).state_dict()
    weights = StateDictCheckpoint(state, program.base_prefix)
    mesh = None if ranks is None else tp_mesh(ranks)
    executor = compiler.make_executor(program, weights, RECIPES, None, "cpu", mesh)
    for adapter in executor.adapters.values():
        fill(adapter.tensors)
        executor.refresh_adapter(adapter.name)
    return executor


@pytest.mark.parametrize("degree", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["nf4", "int4_g64", "mxfp4", "q8_0", "int8_weight"])
def test_a_job_over_ranks_gives_what_it_gives_on_one(name: str, degree: int) -> None:
    whole = make_executor(name)
    expected = work(whole)

    def on_rank(ranks: Any) -> tuple[Any, int]:
        executor = make_executor(name, degree, ranks)
        held = executor.state.weight_store.size_bytes
        return work(executor), held

    report = explaining.explain(
        config(), RECIPES["a"], tp=degree, quantization=name, dtype="float32"
    )
    for outcome, held in run_ranks(degree, on_rank):
        assert worst_error(outcome, expected) < 1e-5
        # A rank of nf4 has all nested scales, and not its share of them.
        rest = 2e-3 if name == "nf4" else 0
        assert held == pytest.approx(report.memory_bytes["weights"], rel=rest)


def test_a_cut_inside_a_block_is_refused_with_the_degrees_that_fit() -> None:
    with pytest.raises(ParallelError, match=r"o_proj.* inside a block of 128 .*: 2$"):
        run_ranks(4, lambda ranks: make_executor("int4_g128", 4, ranks))


@pytest.mark.parametrize("name", ["nf4", "int8"])
def test_bytes_of_the_base_are_those_that_explain_predicts(name: str) -> None:
    executor = make_executor(name)
    report = explaining.explain(config(), None, quantization=name, dtype="float32")
    packed = 0
    sums = native.is_native(torch.device("cpu"))
    # What their product reads besides: sums of rows, or with VNNI a packed copy.
    if name == "int8" and (sums or torch.cpu._is_vnni_supported()):
        shapes = [
            parameter.type.features
            for block in executor.state.program.base.blocks
            for parameter in block.parameters
            if parameter.type.dtype == name
        ] * len(executor.state.program.base.layers)
        packed = sum(4 * rows if sums else rows * columns for rows, columns in shapes)
    held = executor.state.weight_store.size_bytes
    assert held - packed == pytest.approx(report.memory_bytes["weights"], rel=2e-3)


def test_a_program_of_a_quantized_base_is_saved_and_loaded(tmp_path: Path) -> None:
    model = tmp_path / "model"
    oracle.save_model(oracle.random_model(config()), model)
    program = compiler.compile_program(model, quantization="nf4")
    save_program(program, tmp_path / "program", weights=model)
    executor, loaded = pcg.compile(model, quantization="nf4"), pcg.load(tmp_path / "program")
    (sequence,) = prompts((9,))
    assert loaded.logits([sequence])[0].equal(executor.logits([sequence])[0])
    assert base_digest(loaded.state.weight_store) == base_digest(executor.state.weight_store)
    float_executor = pcg.compile(model)
    assert base_digest(float_executor.state.weight_store) != base_digest(
        executor.state.weight_store
    )


@pytest.mark.parametrize(("cut", "name"), [("searched", "nf4"), ("linear", "q8_0")])
@pytest.mark.parametrize("method", ["lora", "dora"])
def test_split_clients_of_a_quantized_base(method: str, cut: str, name: str) -> None:
    recipe = LoraConfig(r=4, use_dora=method == "dora", target_modules="all-linear")
    program = compiler.compile_program(
        config(), None, quantization=name, dtype="float32", packed_weights=False
    )
    weights = StateDictCheckpoint(oracle.random_model(config()).state_dict(), program.base_prefix)
    whole = compiler.make_executor(program, weights, None, None, "cpu")
    tokens, expected = results(whole, recipe)
    with running_base(whole) as base:
        client = base.connect(cut=cut)
        split_tokens, found = results(client, recipe)
    assert split_tokens == tokens
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert oracle.relative_error(found[key], tensor) < 1e-5, key


def test_bases_with_some_layers_have_one_digest() -> None:
    program = compiler.compile_program(
        config(), None, quantization="nf4", dtype="float32", packed_weights=False
    )
    weights = StateDictCheckpoint(oracle.random_model(config()).state_dict(), program.base_prefix)
    whole = compiler.make_executor(program, weights, None, None, "cpu")
    expected = BaseExecutor(whole).digest
    for layers in ("0", "1"):
        base = BaseExecutor(executor_of(program, weights, layers, "cpu"))
        base.leave_absent()
        assert base.digest == expected
        assert {name.split(".")[2] for name in base.multiplied if ".layers." in name} == {layers}


def test_replicas_do_not_shard_a_quantized_base() -> None:
    with pytest.raises(ParallelError, match="stored as nf4; leave shard_base out"):
        explaining.explain(config(), RECIPES["a"], quantization="nf4", shard_base=2)


def test_a_plan_of_machines_has_the_format_in_its_command_and_bytes() -> None:
    options = {"workload": "train:4x64", "gpus": ["A100-80"], "peft": "lora", "max_gpus": 2}
    whole = planning.plan(config(), **options)
    quantized = planning.plan(config(), quantization="nf4", **options)
    assert whole.chosen is not None
    assert quantized.chosen is not None
    assert "--quantization nf4" in quantized.command(quantized.chosen)
    assert quantized.chosen.memory_bytes["weights"] < whole.chosen.memory_bytes["weights"] / 2
