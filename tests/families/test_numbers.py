"""Every family against transformers and peft: logits, greedy tokens, gradients, adapter files.

One executor serves all checks of a case. Its two adapters are made and saved by peft: one on all
linear modules, one on the family's usual targets, with other ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import pcg.compiler as compiler
from pcg.runtime.data.example import Example
from pcg.runtime.executor import Executor
from pcg.runtime.model.weights import Checkpoint
from pcg.source import resolve
from tests.support import oracle
from tests.support.families import FAMILIES, Family
from tests.support.prompts import LENGTHS, TOLERANCE, prompts

ADAPTERS = ("all", None, "usual", None, "all")


@dataclasses.dataclass(frozen=True)
class Case:
    family: Family
    base: Any
    wrapped: Mapping[str, Any]
    saved: Path
    executor: Executor

    def model(self, adapter: str | None) -> Any:
        return self.base if adapter is None else self.wrapped[adapter]


OF_TWO_LAYERS = ("llama3", "gpt2", "gemma2")
"""Families that are run with two layers, too; the others in the slow run."""
CASES = [
    pytest.param(
        (family, layers),
        id=f"{family}-{layers}",
        marks=pytest.mark.slow if layers == 2 and family.name not in OF_TWO_LAYERS else (),
    )
    for family in FAMILIES
    for layers in (2, 3)
]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family, layers = request.param
    base = oracle.random_model(family.config(layers))
    wrapped = {
        "all": oracle.with_adapter(base, family.linear, rank=4, excluded=family.excluded),
        "usual": oracle.with_adapter(base, family.usual_targets, rank=3, seed=2),
    }
    saved = tmp_path_factory.mktemp("adapters")
    for name, model in wrapped.items():
        oracle.save(model, saved / name)
    executor = compiler.compile(base, {name: str(saved / name) for name in wrapped})
    return Case(family, base, wrapped, saved, executor)


@pytest.mark.parametrize("lengths", [LENGTHS, (40,) * 5], ids=["ragged", "uniform"])
def test_logits_with_and_without_adapters_in_one_batch(case: Case, lengths: Sequence[int]) -> None:
    sequences = prompts(lengths)
    found = case.executor.logits(sequences, list(ADAPTERS))
    for logits, sequence, adapter in zip(found, sequences, ADAPTERS, strict=True):
        expected = oracle.logits(case.model(adapter), sequence)
        assert oracle.relative_error(logits, expected) < TOLERANCE


def test_the_base_from_sharded_files(case: Case, tmp_path: Path) -> None:
    oracle.save_model(case.base, tmp_path, "20KB")
    source, program = resolve(tmp_path, weights=True), case.executor.program
    assert len(source.weight_files) > 1
    weights = Checkpoint.open(source, program.base_prefix)
    executor = compiler.make_executor(program, weights, None, None)
    for sequence in prompts((9, 1)):
        assert torch.equal(executor.logits(sequence), case.executor.logits(sequence))


def test_greedy_tokens_of_a_ragged_batch(case: Case) -> None:
    sequences = prompts(LENGTHS)
    completions = case.executor.generate(
        sequences, list(ADAPTERS), max_new_tokens=oracle.NEW_TOKENS, ignore_eos=True
    )
    expected = [
        oracle.greedy(case.model(adapter), sequence)
        for sequence, adapter in zip(sequences, ADAPTERS, strict=True)
    ]
    assert [list(completion.token_ids) for completion in completions] == expected


@pytest.mark.parametrize("adapter", ["all", "usual"])
def test_gradients_of_every_parameter(case: Case, adapter: str) -> None:
    sequences = prompts((40, 7, 13, 40, 37))
    runner = case.executor.training_runner(adapter)
    for parameter in runner.parameters.values():
        parameter.grad = None
    targets = sum(len(sequence) - 1 for sequence in sequences)
    loss = runner.forward_backward([Example(s, s) for s in sequences], targets)
    expected_loss, expected = oracle.loss_and_gradients(case.wrapped[adapter], sequences)
    assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
    assert runner.parameters.keys() == expected.keys()
    for name, parameter in runner.parameters.items():
        error = (parameter.grad - expected[name]).norm() / expected[name].norm()
        assert error < TOLERANCE, name


@pytest.mark.parametrize("adapter", ["all", "usual"])
def test_peft_reads_what_we_save(case: Case, adapter: str, tmp_path: Path) -> None:
    case.executor.save_adapter(adapter, tmp_path / "ours")
    theirs = load_file(case.saved / adapter / "adapter_model.safetensors")
    ours = load_file(tmp_path / "ours" / "adapter_model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    (sequence,) = prompts((9,))
    reread = oracle.load_saved(case.base, tmp_path / "ours")
    expected = oracle.logits(case.wrapped[adapter], sequence)
    assert torch.equal(oracle.logits(reread, sequence), expected)
