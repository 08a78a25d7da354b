"""Residual sums that the next layer makes: where they go, and that nothing else changes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from pcg import compiler
from pcg.compiler import compile_program
from pcg.ir.analysis.verifier import verify
from pcg.ir.program.program import ModelGraph
from pcg.passes.fusion.defer_sums import DeferResidualAdd
from pcg.passes.graphs.pass_base import On, Stage
from pcg.passes.pipeline import Pipeline, Settings, pipeline
from pcg.passes.stages import Trained
from tests.support import compiled, oracle
from tests.support.families import BY_NAME
from tests.support.kernel_graphs import groups
from tests.support.parameters import mostly_slow
from tests.support.prompts import prompts


def model_of(name: str, **options: Any) -> ModelGraph:
    return compile_program(BY_NAME[name].config(2), None, **options).serving.model


def handed_on(model: ModelGraph) -> ModelGraph:
    found = DeferResidualAdd().run(model)
    for graph in found.graphs:
        verify(graph)
    return found


def kernels(model: ModelGraph) -> list[list[str]]:
    """Operators of each kernel of the layer."""
    (block,) = model.blocks
    return [[node.op for node in group.nodes] for group in groups(block)]


def test_the_sum_is_in_the_kernel_of_the_next_norm() -> None:
    model = model_of("llama3")
    found = handed_on(model)
    assert kernels(model)[0] == ["rms_norm"]
    assert kernels(found) == [["add", "rms_norm"], *kernels(model)[1:]]
    (block,) = found.blocks
    last = model.blocks[0].producers[model.blocks[0].outputs[0]]
    assert block.outputs == last.inputs
    assert [value.name for value in block.inputs] == ["residual", "branch", "cos", "sin"]
    assert [node.op for node in found.epilogue.nodes] == ["add", "rms_norm", "linear"]
    x, zeros, *shared = found.prologue.outputs
    assert [x, *shared] == [*model.prologue.outputs]
    assert found.prologue.producers[zeros].op == "sub"


@pytest.mark.parametrize(
    "name",
    mostly_slow(
        [
            pytest.param("gemma2", id="a norm makes a summand"),
            pytest.param("granite", id="a factor makes a summand"),
            pytest.param("gptj", id="a sum makes a summand"),
            pytest.param("opt-post_norm", id="a norm comes last"),
        ]
    ),
)
def test_what_a_kernel_makes_anyway_stays(name: str) -> None:
    model = model_of(name)
    assert DeferResidualAdd().run(model) is model


def test_parts_of_tokens_stay() -> None:
    model = model_of("llama3", tp=2, sequence_parallel=True)
    assert DeferResidualAdd().run(model) is model
    assert DeferResidualAdd().run(model_of("llama3", tp=2)) != model


@pytest.mark.parametrize(
    "name", mostly_slow(["llama3", "gpt2", "gpt_neox-serial", "mpt", "qwen2.5-windows"], "gpt2")
)
def test_logits_are_equal_to_the_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    base = oracle.random_model(BY_NAME[name].config(2))
    sequences = prompts((5, 1, 9))
    expected = compiled.executor(base).logits(sequences)

    def deferring(settings: Settings) -> Pipeline:
        found = pipeline(settings)
        deferred = On("serving", DeferResidualAdd())
        fuse = Stage[Trained, Trained]("fuse", (*found.fuse.passes, deferred))
        return dataclasses.replace(found, fuse=fuse)

    monkeypatch.setattr(compiler, "pipeline", deferring)
    executor = compiler.compile(base)
    assert len(executor.serving.runner.model.blocks[0].outputs) == 2
    for ours, theirs in zip(executor.logits(sequences), expected, strict=True):
        assert torch.equal(ours, theirs)
