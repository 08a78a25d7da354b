"""Ranks of context parallelism share the prompts of an engine; each has all of the KV cache."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from pcg.errors import UnsupportedError
from pcg.peft.prompt import PromptTuningConfig
from pcg.ranks import stages as pipeline
from pcg.ranks.mesh import MeshSizes, RankMesh
from pcg.runtime.admission.limits import Limits
from pcg.runtime.engine.device.served_batch import ServedBatch
from pcg.runtime.executor import Executor
from pcg.runtime.model import runner
from tests.support.interpreter import bf16
from tests.support.parameters import mostly_slow
from tests.support.prompts import prompts
from tests.support.ranked import EXAMPLES, make_executor, make_program
from tests.support.threads import run_mesh

bf16.install()
LAYERS = 3
SEQUENCES = prompts((37, 3, 9, 1, 21))
USED = ("a", None, "b", "a", "soft")
LIMITS = Limits(tokens=24)
TWO = MeshSizes(cp=2)


def serve(executor: Executor) -> Any:
    """What requests of mixed adapters have, in steps that cut prompts, and beside decoding."""
    executor.add_adapter("soft", PromptTuningConfig(num_virtual_tokens=5), seed=1)
    options: dict[str, Any] = {"max_new_tokens": 6, "ignore_eos": True}
    engine = executor.engine(LIMITS, kv_cache_bytes=2**20, prefix_caching=True)
    tokens = {}
    for turn in range(2):  # the second one finds its prompts in the cache
        for ids, adapter in zip(SEQUENCES, USED, strict=True):
            engine.submit(executor.request(ids, adapter, **options))
        for _ in range(200):
            for chunk in engine.step():
                if chunk.completion is not None:
                    tokens[turn, chunk.index] = chunk.completion.token_ids
            if engine.is_idle:
                break
    engine.check_integrity()
    asked: dict[str, Any] = {"logprobs": 2, "prompt_logprobs": 1, "temperature": 1.0, "seed": 3}
    done = executor.generate(SEQUENCES, USED, n=2, **asked, **options)
    found = [t for one in done for t in (*(one.prompt_logprobs or ()), *(one.logprobs or ()))]
    numbers = torch.tensor([one.logprob for one in found if one is not None])
    states = executor.embed(SEQUENCES, USED, pooling="mean")
    return tokens, [one.token_ids for one in done], numbers, states


def noted_parts(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, int]]:
    """Counts the steps by their tokens, and by those that a rank has of them.

    Steps that decode alone are whole on each.
    """
    put, found = ServedBatch.put, Counter[tuple[int, int]]()

    def noted(own: ServedBatch, *given: Any) -> None:
        put(own, *given)
        if all(span.length == 1 for span in own.spans):
            assert own.parts[0][0] is own.batch
        found[len(own.ids), sum(len(batch.input_ids) for batch, _ in own.parts)] += 1

    monkeypatch.setattr(ServedBatch, "put", noted)
    return found


def check_same(found: Any, expected: Any) -> None:
    assert found[:2] == expected[:2]
    for ours, theirs in zip(found[2:], expected[2:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("mixtral", MeshSizes(cp=3)),
        pytest.param("llama3", TWO, marks=pytest.mark.slow),
        pytest.param("gpt2", MeshSizes(cp=2, tp=2), marks=pytest.mark.slow),
        pytest.param("gemma2", TWO, marks=pytest.mark.slow),
        pytest.param("bloom", TWO, marks=pytest.mark.slow),
        pytest.param("llama3", MeshSizes(pp=2, cp=2), marks=pytest.mark.slow),
        pytest.param("qwen3", MeshSizes(cp=4), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_requests_are_those_of_one_rank(
    name: str, sizes: MeshSizes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "LEAST_TOKENS", 4)
    monkeypatch.setattr(pipeline, "LEAST_TOKENS", 8)
    expected = serve(make_executor(make_program(name, 1, LAYERS), name))
    program = make_program(name, sizes.tp, LAYERS)
    cut = noted_parts(monkeypatch)
    for found in run_mesh(sizes, lambda mesh: serve(make_executor(program, name, mesh))):
        check_same(found, expected)
    assert {own < whole for whole, own in cut} == {True, False}


@pytest.mark.parametrize("sizes", mostly_slow([TWO, MeshSizes(pp=2)], MeshSizes(pp=2)), ids=str)
def test_programs_for_triton(sizes: MeshSizes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels write a rank's own rows, and then those of others; no LoRA is left to be added."""
    monkeypatch.setattr(runner, "LEAST_TOKENS", 16)
    monkeypatch.setattr(pipeline, "LEAST_TOKENS", 8)
    options: dict[str, Any] = {"max_new_tokens": 3, "ignore_eos": True}
    asked = [ids[:14] for ids in SEQUENCES[:3]], ("a", None, "b")
    expected = make_executor(make_program("llama3", 1), "llama3").generate(*asked, **options)
    program = make_program("llama3", 1, backend="triton")
    cut = noted_parts(monkeypatch)
    for found in run_mesh(
        sizes, lambda mesh: make_executor(program, "llama3", mesh).generate(*asked, **options)
    ):
        assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert {own < whole for whole, own in cut} == ({True, False} if sizes == TWO else {False})


def test_an_engine_on_a_thread_and_what_it_refuses() -> None:
    """The first rank drives; few tokens are not shared, and jobs are refused by name."""
    options: dict[str, Any] = {"max_new_tokens": 5, "ignore_eos": True}

    def run(mesh: RankMesh | None) -> Any:
        executor = make_executor(make_program("llama3", 1), "llama3", mesh)
        with executor.engine(kv_cache_bytes=2**20).start() as running:
            if mesh is not None and mesh.world.rank:
                return None
            done = executor.generate(SEQUENCES, (*USED[:-1], None), **options)
            if mesh is not None:
                with pytest.raises(UnsupportedError, match="a job of an engine over cp=2"):
                    running.finetune(EXAMPLES, "b").wait(60)
                assert executor.generate(SEQUENCES[:1], "b", **options)
            return [one.token_ids for one in done]

    assert run_mesh(TWO, run)[0] == run(None)
