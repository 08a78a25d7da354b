"""Jobs of every method in an engine: gradients are peft's however their units meet requests.

Windows of random sizes go forward in steps with requests of other methods, alone, or layer by
layer; parts of the loss and layers backward run after steps or between them; jobs take turns and
pause, and requests are cancelled and lose their pages to others, where memory is short. Of each job
the loss and the gradient of every parameter are those of whole sequences in transformers and peft,
and of each request the tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pcg.runtime.admission.limits import Limits
from pcg.runtime.data.example import Example
from pcg.runtime.engine.scheduling.jobs import Job
from pcg.runtime.engine.scheduling.work import Sharing, Work
from pcg.runtime.memory.kv_cache import bytes_of_page, kv_types
from pcg.runtime.memory.pool import pages_for
from pcg.runtime.metrics.events import Kind
from pcg.runtime.metrics.status import JobState
from pcg.runtime.requests.request import Request
from pcg.runtime.requests.step import Load
from pcg.runtime.sampling.sampling_params import SamplingParams
from pcg.runtime.training.runner import TrainingRunner, pass_through, training_runner
from pcg.runtime.training.work_units import Forward, Part, Phase
from tests.support import oracle
from tests.support.parameters import mostly_slow
from tests.support.peft_cases import CONFIGS, Models, trained_gradients
from tests.support.prompts import TOLERANCE, prompts

NEW = 20
LENGTHS = ((13, 7, 21), (30, 2), (17,))
"""Of jobs' sequences."""
PROMPTS = (3, 33, 16, 1, 25)


class AnyShare(Sharing):
    """Any part of the finetuning that there is, in any step."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def serves(self, has_work: bool) -> bool:
        return not has_work or self._random.random() < 0.8

    def forward(self, work: Work, unit: Forward) -> int:
        room = work.limits.tokens - work.load.tokens
        return self._random.choice((0, 1, 2, 5, 9, max(room, 0)))

    def in_layers(self, work: Work, unit: Forward, ahead_s: float, **_: bool) -> int:
        return self._random.choice((0, 0, 0, 3, 8))

    def fits(self, work: Work, phase: Phase, load: Load, ahead_s: float, **_: bool) -> bool:
        return self._random.random() < 0.7

    def part(self, work: Work, part: Part, beside: Load, ahead_s: float, *, is_due: bool) -> int:
        tokens = super().part(work, part, beside, ahead_s, is_due=is_due)
        is_loss = part.stage.phase is Phase.LOSS
        return min(tokens, self._random.choice((1, 2, 7, 99))) if is_loss else tokens


def check(case: Models, names: Sequence[str], random: Random) -> set[Kind]:
    """Train adapters beside requests of all; what happened of all that can."""
    executor = case.executor
    limits = Limits(running=random.choice((2, 8)), tokens=random.choice((4, 19, 64)), least_chunk=3)
    jobs: dict[str, tuple[TrainingRunner, Job, list[list[int]]]] = {}
    needs: list[int] = []
    for name in names:
        sequences = prompts(random.choice(LENGTHS))
        examples = [Example(s, s) for s in sequences]
        runner = training_runner(executor.state, executor.adapters[name], windows=True)
        for parameter in runner.parameters.values():
            parameter.grad = None
        work = pass_through(runner, examples, runner.count_targets(examples))
        jobs[name] = runner, Job(name, work), sequences
        virtual = runner.adapter.prompt_tokens
        needs.append(sum(pages_for(virtual + len(s)) for s in sequences))
    params = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
    coming: list[tuple[Request, str | None]] = []
    page_bytes, largest = bytes_of_page(kv_types(executor.serving.runner.model)), 0
    for _ in range(random.randrange(4, 12)):
        (prompt,) = prompts((random.choice(PROMPTS),))
        name = random.choice([None, *case.wrapped])
        request = Request(tuple(prompt), params, None if name is None else executor.adapters[name])
        coming.append((request, name))
        size = 0 if request.adapter is None else -(-request.adapter.size_bytes // page_bytes)
        largest = max(largest, size + pages_for(request.length + NEW))
    # Room for one job or for all, for the largest request with its adapter, and little more.
    most = random.choice((max(needs), sum(needs)))
    pages = most + largest + random.randrange(2)
    engine = executor.engine(
        limits,
        kv_cache_bytes=pages * page_bytes,
        job_share=(most + 0.5) / pages,
        sharing=AnyShare(random),
    )
    asked: dict[int, tuple[Request, str | None]] = {}
    cancelled: set[int] = set()
    done: dict[int, list[int]] = {}
    waiting = [job for _, job, _ in jobs.values()]
    steps = 0
    while coming or waiting or engine.jobs or not engine.is_idle:
        if waiting and random.random() < 0.5:
            engine.jobs.add(waiting.pop())
        if coming and random.random() < 0.5:
            asked[engine.submitted] = coming.pop()
            engine.submit(asked[engine.submitted][0])
        if asked and random.random() < 0.05:
            cancelled.add(random.choice([*asked]))
            engine.cancel(f"request {max(cancelled)}")
        for job in [*engine.jobs]:
            if random.random() < (0.05 if job.state is JobState.RUNNING else 0.6):
                (engine.pause_job if job.state is JobState.RUNNING else engine.resume_job)(job.name)
        for chunk in engine.step():
            if chunk.completion is not None and chunk.completion.finish_reason == "length":
                done[chunk.index] = list(chunk.completion.token_ids)
        engine.check_integrity()
        steps += 1
        assert steps < 20_000
    assert asked.keys() - cancelled <= done.keys()
    for index, tokens in done.items():
        request, name = asked[index]
        assert tokens == greedy(case.model(name), request.prompt_ids)
    for name, (runner, job, sequences) in jobs.items():
        assert job.state is JobState.SUCCEEDED, job.error
        check_job(case, name, runner, job.result.loss, sequences)
    return {event.kind for event in engine.log}


def check_job(
    case: Models, name: str, runner: TrainingRunner, loss: float, sequences: list[list[int]]
) -> None:
    wrapped = case.wrapped[name]
    wrapped.zero_grad()
    expected_loss, _ = oracle.loss_and_gradients(wrapped, sequences)
    assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
    expected: Mapping[str, Tensor] = trained_gradients(wrapped)
    assert runner.parameters.keys() == expected.keys()
    for path, parameter in runner.parameters.items():
        theirs = expected[path].reshape(parameter.shape)
        assert parameter.grad is not None
        assert float((parameter.grad - theirs).norm() / theirs.norm()) < TOLERANCE, path
        parameter.grad = None


@cache
def greedy(model: Any, prompt: tuple[int, ...]) -> list[int]:
    return oracle.greedy(model, prompt, NEW)


@pytest.mark.parametrize("family", mostly_slow(CONFIGS, "opt"))
def test_some(models: Mapping[str, Models], family: str) -> None:
    case = models[family]

    @settings(max_examples=4)
    @given(seed=st.integers(0, 2**32))
    def live(seed: int) -> None:
        random = Random(seed)
        check(case, random.sample([*case.wrapped], 3), random)

    live()


@pytest.mark.slow
@pytest.mark.parametrize("family", CONFIGS)
def test_every_method(models: Mapping[str, Models], family: str) -> None:
    case = models[family]
    happened: set[Kind] = set()
    for name in case.wrapped:
        others = [other for other in case.wrapped if other != name]
        for seed in range(8):
            random = Random(f"{family} {name} {seed}")
            happened |= check(case, [name, *random.sample(others, seed % 2)], random)
    assert {Kind.PREEMPTED, Kind.CANCELLED, Kind.PAUSED, Kind.EVICTED} <= happened
