"""AdaLoRA trained over ranks: losses, masks and adapters are those of one rank, and of peft."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import pcg.compiler as compiler
from pcg.ir.layouts import REPLICATED, WHOLE, Layout
from pcg.ir.program.program import Program
from pcg.ir.types import TORCH_NAMES
from pcg.parallel.base_plan import COLUMN, ROW
from pcg.parallel.parallel_plan import ParallelPlan
from pcg.parallel.search import Search
from pcg.peft.adapter import Adapter
from pcg.runtime.data.example import Example
from pcg.runtime.executor import Executor
from pcg.runtime.model.weights import StateDictCheckpoint
from tests.support import oracle
from tests.support.adalora import DICT, FIELDS, OPTIONS, pair, train_peft
from tests.support.families import BY_NAME
from tests.support.peft_cases import trained
from tests.support.prompts import TOLERANCE, prompts
from tests.support.threads import ThreadRanks, run_ranks, tp_mesh

STEPS = 12
SEQUENCES = prompts((9, 14, 6))
EXAMPLES = [Example(ids, ids) for ids in SEQUENCES]
JOB: Mapping[str, Any] = {**OPTIONS, "max_steps": STEPS, "shuffle": False}
WAYS: Mapping[str, tuple[Layout, Layout, Layout]] = {
    "rows": (COLUMN, COLUMN, ROW),
    "columns": (ROW, REPLICATED, COLUMN),
    "copies": (REPLICATED, REPLICATED, REPLICATED),
    "whole": (WHOLE, WHOLE, WHOLE),
    "mixed": (COLUMN, WHOLE, COLUMN),
}
"""Layouts of A, E and B; `rows` are triplets of each rank's own."""


@dataclass(frozen=True)
class Trained:
    """What a job gives on a rank."""

    losses: tuple[float, ...]
    adapter: Adapter

    @property
    def kept(self) -> Any:
        return self.adapter.recipe.rank_pattern  # type: ignore[attr-defined]


def program_of(name: str, degree: int, dtype: str = "float64") -> Program:
    """In fp64, as steps make much of rounding."""
    config = oracle.random_model(BY_NAME[name].config(2)).config.to_dict()
    return compiler.compile_program(config, None, tp=degree, dtype=dtype)


def executor_of(program: Program, name: str, ranks: ThreadRanks | None = None) -> Executor:
    dtype = getattr(torch, TORCH_NAMES[program.dtype])
    state = oracle.random_model(BY_NAME[name].config(2), dtype).state_dict()
    weights = StateDictCheckpoint(state, program.base_prefix)
    return compiler.make_executor(
        program, weights, None, None, "cpu", None if ranks is None else tp_mesh(ranks)
    )


def train(executor: Executor, peft: Any, **options: Any) -> Trained:
    if isinstance(peft, Path):
        executor.add_adapter("a", peft)
        peft = None
    result = executor.finetune(EXAMPLES, "a", peft=peft, **{**JOB, **options})
    return Trained(result.losses, executor.adapters["a"])


def over_ranks(
    name: str, degree: int, peft: Any, dtype: str = "float64", **options: Any
) -> list[Trained]:
    program = program_of(name, degree, dtype)
    if degree == 1:
        return [train(executor_of(program, name), peft, **options)]
    act = lambda ranks: train(executor_of(program, name, ranks), peft, **options)  # noqa: E731
    return run_ranks(degree, act)


def check_same(found: Trained, expected: Trained, tolerance: float = 1e-8) -> None:
    """The same triplets, and numbers up to rounding."""
    assert found.kept == expected.kept
    assert found.losses == pytest.approx(expected.losses, rel=tolerance)
    for path, weights in expected.adapter.weights.items():
        for kind, tensor in weights.stored.items():
            own = found.adapter.weights[path].stored[kind]
            assert own.shape == tensor.shape
            assert (own - tensor).norm() <= tolerance * tensor.norm(), (path, kind)


def recipe(name: str) -> dict[str, Any]:
    targets = {"llama3": ["q_proj", "o_proj", "down_proj"]}.get(name, "all-linear")
    return {**DICT, "init_lora_weights": False, "target_modules": targets}


def force(ways: tuple[Layout, Layout, Layout], monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold A, E and B of what is trained in given layouts."""
    kinds = dict(zip((".adalora_A", ".adalora_E", ".adalora_B"), ways, strict=True))
    free = Search.plan

    def forced(search: Search) -> ParallelPlan:
        held = {
            parameter.name: layout
            for parameter in search.graph.parameters
            for kind, layout in kinds.items()
            if parameter.source.endswith(kind)
        }
        return search.hold(held) if held else free(search)

    monkeypatch.setattr(Search, "plan", forced)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "degree"),
    [
        ("llama3", 2),
        # Fused projections, of which some rows are every rank's.
        pytest.param("gpt2", 2, marks=pytest.mark.slow),
        pytest.param("falcon-7b", 4, marks=pytest.mark.slow),
    ],
)
def test_a_schedule_over_ranks_is_that_of_one(name: str, degree: int) -> None:
    (expected,) = over_ranks(name, 1, recipe(name))
    kept = [sum(which) for which in expected.kept.values()]
    assert sum(kept) == FIELDS["target_r"] * len(kept)
    assert len(set(kept)) > 1
    for found in over_ranks(name, degree, recipe(name)):
        check_same(found, expected)


@pytest.mark.slow
def test_a_schedule_over_ranks_is_pefts(tmp_path: Path) -> None:
    _, wrapped, _ = pair(tmp_path)
    losses = train_peft(wrapped, SEQUENCES, STEPS)
    oracle.save(wrapped, tmp_path / "theirs")
    config = json.loads((tmp_path / "theirs" / "adapter_config.json").read_text())
    for found in over_ranks("llama3", 2, tmp_path / "start", "float32"):
        assert list(found.losses) == pytest.approx(losses, rel=1e-4)
        theirs = {
            key.removeprefix("base_model.model."): which
            for key, which in config["rank_pattern"].items()
        }
        assert {key: list(which) for key, which in found.kept.items()} == theirs


@pytest.mark.parametrize(
    "way",
    [pytest.param(w, marks=() if w == "rows" else pytest.mark.slow) for w in WAYS],
)
def test_it_is_the_same_however_it_is_held(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (expected,) = over_ranks("llama3", 1, recipe("llama3"))
    force(WAYS[way], monkeypatch)
    for found in over_ranks("llama3", 2, recipe("llama3")):
        check_same(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [pytest.param(w, marks=() if w in ("rows", "columns") else pytest.mark.slow) for w in WAYS],
)
def test_the_orthogonal_loss_over_ranks_is_pefts(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the data's loss, whose gradients ranks have summed before."""
    _, wrapped, _ = pair(tmp_path)
    (sequence,) = prompts((11,))
    ids = torch.tensor([sequence])
    out = wrapped(ids, labels=ids)
    out.loss.backward()
    force(WAYS[way], monkeypatch)
    program = program_of("llama3", 2, "float32")

    def on_rank(ranks: ThreadRanks) -> tuple[float, dict[str, Tensor]]:
        executor = executor_of(program, "llama3", ranks)
        executor.add_adapter("a", tmp_path / "start")
        runner = executor.training_runner("a")
        loss = runner.forward_backward([Example(sequence, sequence)], 10) / 10
        runner.sum_gradients()
        allocator = runner.adapter.recipe.training_beside(runner.shards, STEPS)
        assert allocator is not None
        loss += allocator.regularize()
        gradients = {n: t.grad for n, t in runner.parameters.items() if t.grad is not None}
        return loss, runner.shards.joined(gradients)

    theirs = trained(wrapped)
    for loss, gradients in run_ranks(2, on_rank):
        assert loss == pytest.approx(float(out.loss.detach()), rel=TOLERANCE)
        assert gradients.keys() == theirs.keys()
        for path, gradient in gradients.items():
            expected = theirs[path].grad
            assert (gradient - expected).norm() < TOLERANCE * expected.norm(), path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then", "stop"),
    [(2, 1, 5)]
    + [
        pytest.param(*case, marks=pytest.mark.slow)
        for case in ((1, 2, 8), (2, 2, 5), (2, 4, 2), (4, 2, 10), (1, 4, 5))
    ],
)
def test_a_job_is_resumed_at_another_degree(
    first: int, then: int, stop: int, tmp_path: Path
) -> None:
    """Between two allocations, where triplets are off already, or when ranks are given."""
    (expected,) = over_ranks("llama3", 1, recipe("llama3"))
    options = {"checkpoint_dir": tmp_path, "save_every": 1, "resume": "auto"}
    over_ranks("llama3", first, recipe("llama3"), **{**options, "max_steps": stop})
    for found in over_ranks("llama3", then, recipe("llama3"), **options):
        check_same(found, expected)
