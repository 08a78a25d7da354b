"""An engine on threads over ranks: the first drives, and all have one rank's tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pcg.errors import AdapterError, EngineError, FinetuneError, GenerationError, UnsupportedError
from pcg.runtime.engine.async_engine import AsyncEngine
from pcg.runtime.executor import Executor
from tests.support.families import BY_NAME
from tests.support.ranked import (
    EXAMPLES,
    JOB,
    SEQUENCES,
    USED,
    make_executor,
    make_program,
    recipes,
)
from tests.support.threads import ThreadRanks, run_ranks

CACHE_BYTES = 2**20
NAME = "llama3"
OPTIONS: dict[str, Any] = {"max_new_tokens": 6, "ignore_eos": True}


def on_ranks(act: Any, degree: int = 2, **options: Any) -> Any:
    """What `act` gives on the first rank, whose engine the others follow."""
    program = make_program(NAME, degree, **options)

    def run(ranks: ThreadRanks) -> Any:
        executor = make_executor(program, NAME, ranks)
        with executor.engine(kv_cache_bytes=CACHE_BYTES).start() as running:
            if ranks.rank == 0:
                return act(executor, running)
        assert running.ended is not None
        assert running.ended.__cause__ is None
        return sorted(executor.adapters)

    return run_ranks(degree, run)


def test_requests_and_a_job() -> None:
    """Tokens and the trained adapter are those of one rank, and of one without a thread."""
    alone = make_executor(make_program(NAME, 1), NAME)
    expected = [one.token_ids for one in alone.generate(SEQUENCES, USED, **OPTIONS)]
    recipe = recipes(BY_NAME[NAME])["b"]
    alone.finetune(EXAMPLES, "new", peft=recipe, **JOB)
    trained = alone.adapters["new"].tensors
    (after,) = alone.generate(SEQUENCES[:1], "new", **OPTIONS)

    def act(executor: Executor, running: AsyncEngine) -> None:
        steps: list[int] = []
        job = running.finetune(
            EXAMPLES, "new", peft=recipe, on_step=lambda one: steps.append(one.step), **JOB
        )
        streams = [
            running.submit(ids, adapter, **OPTIONS)
            for ids, adapter in zip(SEQUENCES, USED, strict=True)
        ]
        assert [stream.wait(60).token_ids for stream in streams] == expected
        result = job.wait(120)
        assert steps == list(range(1, result.steps + 1))
        for ours, theirs in zip(executor.adapters["new"].tensors, trained, strict=True):
            assert float((ours - theirs).norm() / theirs.norm()) < 1e-5
        assert running.submit(SEQUENCES[0], "new", **OPTIONS).wait(60).token_ids == after.token_ids

    assert on_ranks(act)[1] == ["a", "b", "new"]
