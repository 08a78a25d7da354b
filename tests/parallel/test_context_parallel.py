"""Context parallelism: ranks that share the tokens of every sequence train what one rank trains.

One rank's numbers are those of transformers and peft (`tests/families`, `tests/peft`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pcg.errors import UnsupportedError
from pcg.explain import explain as explaining
from pcg.peft.lora import LoraConfig
from pcg.ranks.group import COLLECTIVES
from pcg.ranks.mesh import MeshSizes, RankMesh
from pcg.ranks.step_parts import TokenParts, TokenSums, dealt, most_rows
from pcg.runtime.data.example import Example
from pcg.runtime.executor import Executor
from tests.support import ranked
from tests.support.measured_memory import BATCH, SEQ, measured
from tests.support.meshes import check_close, train
from tests.support.prompts import prompts
from tests.support.ranked import SEQUENCES, USED, make_executor, make_program
from tests.support.started_ranks import SCRIPT, start
from tests.support.threads import run_mesh


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(2, 5))
def test_each_token_has_one_rank_and_all_have_as_much_work(lengths: list[int], degree: int) -> None:
    parts = dealt(lengths, degree)
    for number, length in enumerate(lengths):
        pieces = [[p for p in part if p.sequence == number] for part in parts]
        tokens = [[t for p in own for t in range(p.start, p.stop)] for own in pieces]
        assert sorted(t for own in tokens for t in own) == list(range(length))
        assert all(own == sorted(own) for own in tokens)
        # A token attends to as many tokens as its place; chunks differ by one token.
        work = [sum(own) for own in tokens]
        assert max(work) - min(work) <= 2 * length
    rows = most_rows(lengths, degree)
    assert rows <= sum(lengths) // degree + 2 * len(lengths)


def test_tokens_are_gathered_and_sums_of_them_scattered() -> None:
    lengths = (7, 1, 4)
    whole = torch.arange(12.0).view(12, 1, 1).expand(12, 2, 3)

    def run(mesh: RankMesh) -> None:
        parts = TokenParts(lengths, mesh.cp, torch.device("cpu"))
        origins = (0, 7, 8)
        places = [origins[p.sequence] + t for p in parts.pieces for t in range(p.start, p.stop)]
        keys, values = parts.gathered(whole[places], whole[places, 0])
        torch.testing.assert_close(keys, whole)
        torch.testing.assert_close(values, whole[:, 0])
        sums = TokenSums(parts, whole[places], whole[places, 0])
        sums.add(3, whole[3:], whole[3:, 0])
        of_keys, of_values = sums.scattered()
        expected = 3 * whole * (whole >= 3)
        torch.testing.assert_close(of_keys, expected[places])
        torch.testing.assert_close(of_values, expected[places, 0])

    run_mesh(MeshSizes(cp=3), run)


def test_sequences_of_fewer_tokens_than_ranks_and_dropout() -> None:
    """A rank that has no token of a batch takes part in its messages; dropout is by positions."""
    examples = [Example(ids, ids) for ids in prompts((2, 11, 3, 2))]
    recipe = LoraConfig(r=4, lora_dropout=0.5, target_modules="all-linear")
    options: Mapping[str, Any] = dict(ranked.JOB, gradient_accumulation_steps=1)

    def run(mesh: RankMesh | None) -> tuple[Sequence[float], list[torch.Tensor]]:
        executor = make_executor(program, "llama3", mesh)
        found = executor.finetune(examples, "short", peft=recipe, **options)
        return found.losses, [x.clone() for x in executor.adapters["short"].tensors]

    program = make_program("llama3", 1)
    losses, tensors = run(None)
    for found, trained in run_mesh(MeshSizes(cp=3), run):
        assert found == pytest.approx(losses, rel=1e-5)
        for a, b in zip(trained, tensors, strict=True):
            assert (a - b).norm() <= 1e-5 * b.norm()


@pytest.mark.parametrize("name", ["llama3", "gemma2"])
def test_logits(name: str) -> None:
    """A sequence of one token leaves ranks without any."""
    program = make_program(name, 1)

    def run(executor: Executor) -> list[torch.Tensor]:
        return [*executor.logits(SEQUENCES, USED), executor.logits([5], "a")]

    expected = run(make_executor(program, name))
    for found in run_mesh(MeshSizes(cp=3), lambda mesh: run(make_executor(program, name, mesh))):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("budget", [1, 0])
def test_the_bytes_that_a_rank_sends_are_predicted(budget: int) -> None:
    """One step of two sequences, at a budget that repeats messages, too."""
    length, count, cp = 12, 2, 2
    examples = [Example(ids, ids) for ids in prompts((length,) * count)]
    program = make_program("llama3", 1, memory_budget=budget)
    recipe = ranked.recipes(ranked.BY_NAME["llama3"])["a"]
    options: dict[str, Any] = {"dtype": "float32", "memory_budget": budget, "cp": cp}
    report = explaining.explain(program.config, recipe, batch=count, seq=length, **options)
    assert (report.seq, report.context["rank_tokens"]) == (length, length // cp)

    def sent(mesh: RankMesh) -> dict[str, int]:
        executor = make_executor(program, "llama3", mesh)
        before = dict(mesh.cp.moved_bytes)
        executor.finetune(examples, "a", epochs=1, batch_size=count, progress=False)
        return {kind: mesh.cp.moved_bytes[kind] - before[kind] for kind in COLLECTIVES}

    total = report.context["total"]
    for found in run_mesh(MeshSizes(cp=cp), sent):
        of_tokens = found["all_gather"] + found["reduce_scatter"]
        assert of_tokens == total["forward_bytes"] + total["backward_bytes"]


def test_explain_divides_activations_by_the_ranks() -> None:
    config = make_program("llama3", 1).config
    options: dict[str, Any] = {"peft": "lora", "seq": 96, "dtype": "float32"}
    one, four = (explaining.explain(config, cp=cp, **options) for cp in (1, 4))
    assert four.memory_bytes["activations"] * 4 == one.memory_bytes["activations"]
    ratios = [[point.recompute_flops_ratio for point in report.pareto] for report in (one, four)]
    assert ratios[1] == pytest.approx(ratios[0])
    assert "each with 24 of 96 tokens" in four.to_text()
    with pytest.raises(UnsupportedError, match="peers=True with cp=4"):
        explaining.explain(config, cp=4, peers=True, **options)
    with pytest.raises(UnsupportedError, match="give a recipe"):
        explaining.explain(config, None, cp=4)


@pytest.mark.parametrize("name", ["llama3", "gpt2"])
def test_the_bytes_that_a_rank_saves_are_predicted(name: str) -> None:
    program = make_program(name, 1)
    recipe = ranked.recipes(ranked.BY_NAME[name])["a"]
    step = {"batch": BATCH, "seq": SEQ, "dtype": "float32", "cp": 2}
    report = explaining.explain(program.config, recipe, **step)
    found = run_mesh(MeshSizes(cp=2), lambda mesh: measured(make_executor(program, name, mesh)))
    assert found == [report.memory_bytes["activations"]] * 2


def test_what_parts_do_not_share_is_refused() -> None:
    program = make_program("llama3", 1)

    def run(mesh: RankMesh) -> None:
        executor = make_executor(program, "llama3", mesh)
        with pytest.raises(UnsupportedError, match="a training runner over cp=2"):
            executor.training_runner("a")

    run_mesh(MeshSizes(cp=2), run)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(1200)
def test_programs_for_triton(tmp_path: Path) -> None:
    started = start(SCRIPT, "launch", "train_parts_by_triton", f"output={tmp_path}", "ranks=2")
    executor = make_executor(make_program("llama3", 1), "llama3")
    expected = train(executor, epochs=1, batch_size=4, eval_data=None)
    _, errors = started.communicate(timeout=1000)
    assert started.returncode == 0, errors
    for rank in range(2):
        check_close(torch.load(tmp_path / f"{rank}.pt"), expected)
