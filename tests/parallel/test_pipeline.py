"""Pipeline stages give what one rank with all layers gives, and hold no more than their own."""

from __future__ import annotations

import functools
from typing import Any, cast

import pytest
import torch

from pcg.errors import FinetuneError, ParallelError, UnsupportedError
from pcg.ir.program.program import Program
from pcg.peft.lora import LoraConfig
from pcg.peft.prompt import PromptEncoderConfig, PromptTuningConfig
from pcg.ranks import stages as pipeline
from pcg.ranks.group import Ranks, united
from pcg.ranks.mesh import MeshSizes, RankMesh
from pcg.runtime.engine.device.calibration import calibrated
from pcg.runtime.engine.device.clock import MachineClock
from pcg.runtime.engine.device.served_batch import ServedBatch
from tests.support.meshes import check_close, train
from tests.support.parameters import mostly_slow
from tests.support.ranked import (
    EXAMPLES,
    JOB,
    METHODS,
    SEQUENCES,
    USED,
    make_executor,
    make_program,
)
from tests.support.threads import run_mesh

LAYERS = 4
TWO = MeshSizes(pp=2)


@functools.cache
def program(name: str, degree: int = 1, **options: Any) -> Program:
    return make_program(name, degree, LAYERS, **options)


# ------------------------------------------------------------------------------------ equality


@pytest.mark.parametrize(("pp", "size"), [(2, 1), (3, 8)])
def test_messages_of_a_gpu_run_one_after_the_other(pp: int, size: int) -> None:
    """So stages that send to each other do it in one exchange; in micro-batches, few or many."""
    compiled = program("llama3")
    options = {"batch_size": size, "epochs": 1}
    expected = train(make_executor(compiled, "llama3"), **options)
    run = lambda mesh: train(make_executor(compiled, "llama3", mesh), **options)  # noqa: E731
    for found in run_mesh(MeshSizes(pp=pp), run, wired=True):
        check_close(found, expected)


@pytest.mark.parametrize("sizes", mostly_slow([TWO, MeshSizes(pp=2, tp=2)], TWO), ids=str)
def test_an_engine_on_threads(sizes: MeshSizes) -> None:
    """The first rank drives: it has the last stage, which chooses tokens."""
    options: dict[str, Any] = {"max_new_tokens": 5, "ignore_eos": True, "logprobs": 2}

    def run(mesh: RankMesh | None) -> Any:
        executor = make_executor(program("llama3", mesh.sizes.tp if mesh else 1), "llama3", mesh)
        with executor.engine(kv_cache_bytes=2**20).start() as running:
            if executor.ranks.rank:
                return None
            done = executor.generate(SEQUENCES, USED, **options)
            sampled = executor.generate(SEQUENCES, USED, n=2, temperature=1.0, seed=5, **options)
            running.finetune(EXAMPLES, "b", **{**JOB, "epochs": 1}).wait(120)
            after = executor.generate(SEQUENCES, "b", **options)
            trained = executor.adapters["b"].tensors
            return [one.token_ids for one in (*done, *sampled, *after)], trained

    (found, ours), (expected, theirs) = run_mesh(sizes, run)[0], run(None)
    assert found == expected
    for a, b in zip(ours, theirs, strict=True):
        assert float((a - b).norm() / b.norm()) < 1e-5


@pytest.mark.parametrize(
    ("tokens", "sizes"),
    mostly_slow([(1, TWO), (4, TWO), (4, MeshSizes(pp=2, tp=2))], (1, TWO)),
    ids=str,
)
def test_prompts_in_parts(tokens: int, sizes: MeshSizes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's tokens go through the stages in parts, which cut sequences and prompts anywhere."""
    monkeypatch.setattr(pipeline, "LEAST_TOKENS", tokens)
    options: dict[str, Any] = {"max_new_tokens": 4, "ignore_eos": True}
    used = ("a", None, "soft", "b")

    def run(mesh: RankMesh | None) -> Any:
        compiled = program("llama3", 1 if mesh is None else sizes.tp)
        executor = make_executor(compiled, "llama3", mesh)
        executor.add_adapter("soft", PromptTuningConfig(num_virtual_tokens=6), seed=1)
        done = executor.generate(SEQUENCES, used, prompt_logprobs=1, **options)
        return done, executor.embed(SEQUENCES, used)

    cut: set[int] = set()
    put = ServedBatch.put

    def noted(own: ServedBatch, *given: Any) -> None:
        put(own, *given)
        cut.add(len(own.parts))

    expected, states = run(None)
    monkeypatch.setattr(ServedBatch, "put", noted)
    for completions, embedded in run_mesh(sizes, run):
        assert [c.token_ids for c in completions] == [c.token_ids for c in expected]
        torch.testing.assert_close(embedded, states, rtol=1e-5, atol=1e-5)
        for ours, theirs in zip(completions, expected, strict=True):
            pairs = zip(ours.prompt_logprobs, theirs.prompt_logprobs, strict=True)
            for a, b in [pair for pair in pairs if pair[1] is not None]:
                assert a.logprob == pytest.approx(b.logprob, abs=1e-5)
    assert cut == ({4} if tokens == 1 else {1, 4})


# ------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("recipe", "options", "words"),
    [
        (PromptEncoderConfig(num_virtual_tokens=3), {}, "its encoder trains what all stages read"),
        (METHODS["adalora"], {}, "which ranks all layers' weights, over pp=2"),
        ("lora", {"memory_budget": "40KB"}, "planned for all layers of one rank"),
    ],
    ids=["encoder", "adalora", "budget"],
)
def test_what_stages_do_not_train(recipe: Any, options: dict[str, Any], words: str) -> None:
    def run(mesh: RankMesh) -> None:
        executor = make_executor(program("llama3", **options), "llama3", mesh)
        with pytest.raises(UnsupportedError, match=words):
            train(executor, "new", peft=recipe)
        assert "new" not in executor.adapters

    run_mesh(TWO, run)


def test_a_stage_that_trains_nothing_has_any_optimizer() -> None:
    recipe = LoraConfig(r=4, target_modules=["q_proj"], layers_to_transform=[3])
    options = {"peft": recipe, "optimizer": "muon"}
    expected = train(make_executor(program("llama3"), "llama3"), "top", **options)
    run = lambda mesh: train(make_executor(program("llama3"), "llama3", mesh), "top", **options)  # noqa: E731
    for found in run_mesh(TWO, run):
        torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=0)


def test_a_weight_of_one_stage_that_an_optimizer_does_not_take() -> None:
    """All stages refuse it, as the others would wait for the one that does."""
    recipe = LoraConfig(r=4, target_modules=["q_proj"], layers_to_transform=[3], use_dora=True)

    def run(mesh: RankMesh) -> None:
        with pytest.raises(FinetuneError, match="takes only matrices"):
            train(
                make_executor(program("llama3"), "llama3", mesh), "d", peft=recipe, optimizer="muon"
            )

    run_mesh(TWO, run)


def test_stages_know_one_latency_and_collect_versions() -> None:
    def run(mesh: RankMesh) -> Any:
        state = make_executor(program("llama3"), "llama3", mesh).state
        found = calibrated(state, MachineClock(mesh.alike))
        parts = (found.forward, found.backward, found.loss, found.layer)
        return [(*one.coefficients_s, *one.knee) for one in parts], state.versions._collects

    (first, collects), (second, also) = run_mesh(TWO, run)
    assert first == second
    assert collects
    assert also


def test_what_else_is_refused() -> None:
    def run(mesh: RankMesh) -> None:
        with pytest.raises(ParallelError, match="stages hold whole layers"):
            mesh.sharing(True)
        with pytest.raises(UnsupportedError, match="trainers over"):
            make_executor(program("llama3"), "llama3", mesh).trainer("t")

    run_mesh(MeshSizes(pp=2, dp=2), run)
    run = lambda mesh: make_executor(program("llama3"), "llama3", mesh)  # noqa: E731
    with pytest.raises(ParallelError, match="pp=5 stages need a layer each, and the model has 4"):
        run_mesh(MeshSizes(pp=5), run)


def test_tensors_by_name_are_united() -> None:
    own = {
        0: {"a": torch.arange(3), "é": torch.ones(2, 2).bfloat16()},
        1: {},
        2: {"c": torch.tensor(2.0)},
    }

    def run(mesh: RankMesh) -> dict[str, torch.Tensor]:
        return united(own[mesh.tp.rank], cast(Ranks, mesh.tp))

    for found in run_mesh(MeshSizes(tp=3), run):
        assert found.keys() == {"a", "é", "c"}
        assert torch.equal(found["a"], own[0]["a"])
        assert torch.equal(found["é"], own[0]["é"])
        assert torch.equal(found["c"], own[2]["c"])
