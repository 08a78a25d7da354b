"""An engine that serves requests of mixed adapters beside jobs, on one rank or on several."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pcg.runtime.admission.limits import Limits
from pcg.runtime.engine.engine import Engine
from pcg.runtime.executor import Executor
from pcg.runtime.metrics.events import Kind
from pcg.runtime.metrics.status import JobState
from tests.support.ranked import EXAMPLES, JOB, SEQUENCES, USED

CACHE_BYTES = 2**20
PROMISES = Limits(tokens=24, ttft_slo_s=30.0, tpot_slo_s=10.0)
FREE = Limits(tokens=24)
BUSY = 6
"""Steps that requests are kept coming for."""


@dataclass(frozen=True)
class Served:
    """What an engine made of requests and jobs, and what happened on the way."""

    tokens: dict[int, tuple[int, ...]]
    trained: tuple[Tensor, ...]
    events: tuple[tuple[float, Kind, str], ...]


def serve(
    executor: Executor,
    limits: Limits,
    recipes: Mapping[str, Any],
    each: Callable[[Engine, int], None] = lambda engine, step: None,
    **changes: Any,
) -> Served:
    """Requests of mixed adapters beside jobs that make others.

    Args:
        recipes: those of the jobs, by name.
        each: called before each step, with its number.
        changes: of the jobs' options.
    """
    engine = executor.engine(limits, kv_cache_bytes=CACHE_BYTES)
    assert executor.ranks.size == 1 or engine.device.graphs is None  # collectives are in none
    jobs = [
        engine.finetune(EXAMPLES, name, peft=recipe, publish_every=1, **{**JOB, **changes})
        for name, recipe in recipes.items()
    ]
    tokens: dict[int, tuple[int, ...]] = {}
    steps = 0
    while steps < BUSY or engine.jobs or not engine.is_idle:
        if steps < BUSY:
            place = steps % len(SEQUENCES)
            options: dict[str, Any] = {"max_new_tokens": 9, "ignore_eos": True}
            engine.submit(executor.request(SEQUENCES[place], USED[place], **options))
        each(engine, steps)
        for chunk in engine.step():
            if chunk.completion is not None:
                tokens[chunk.index] = tuple(chunk.completion.token_ids)
        engine.check_integrity()
        steps += 1
        assert steps < 10_000
    assert all(job.state is JobState.SUCCEEDED for job in jobs), [job.error for job in jobs]
    events = tuple((event.time_s, event.kind, event.subject) for event in engine.log)
    trained = [tensor for name in recipes for tensor in executor.adapters[name].tensors]
    return Served(tokens, tuple(trained), events)


def check_close(found: Served, expected: Served) -> None:
    """The same tokens, and trained adapters within 1e-5."""
    assert found.tokens == expected.tokens
    assert len(found.tokens) == BUSY
    for ours, theirs in zip(found.trained, expected.trained, strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 1e-5
