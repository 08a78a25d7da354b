"""Rewards of a policy's completions by graders, for reinforcement learning."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from pcg.errors import GraderError, GradingError
from pcg.graders.grader import Answer, Grade, Grader, GradingHost, Question, all_of
from pcg.graders.sample import Sample
from pcg.graders.sandbox_runner import run_grader

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_AT_ONCE = 8
"""Number of samples graded concurrently, as each may call judges."""


async def rewards_of(grader: Grader, samples: Sequence[Sample], host: GradingHost) -> list[float]:
    """Return the reward of each sample; 0 for a sample that cannot be graded.

    Raises:
        GraderError: no sample can be graded; has the first sample's reason.
    """
    turns = asyncio.Semaphore(_AT_ONCE)

    async def graded(sample: Sample) -> Grade:
        async with turns:
            return await grader.grade(sample, host)

    grades = await asyncio.gather(*map(graded, samples))
    if grades and all(grade.failures for grade in grades):
        raise GraderError(f"no completion can be graded: {grades[0].failures[0].text}")
    return [grade.reward for grade in grades]


class GraderReward:
    """A reward function with TRL's signature, for `pcg.train.grpo`.

    The columns of a row, and its `prompt`, are `item.*` of the grader's templates.

    Raises:
        GraderError: the grader needs a judge; only a server has judges.
    """

    def __init__(self, grader: Grader) -> None:
        judges = [part for part in all_of(grader) if part.judge is not None]
        if judges:
            raise GraderError(
                f"the grader {judges[0].name!r} asks the judge {judges[0].judge!r}, and there is "
                "no server to ask: use a reinforcement job of pcg serve (docs/serving.md)"
            )
        self._grader = grader
        self.__name__ = grader.name

    async def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        trainer_state: object = None,
        completion_ids: object = None,
        **columns: Sequence[Any],
    ) -> list[float]:
        values: Mapping[str, Sequence[Any]] = {"prompt": prompts, **columns}
        rows = [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]
        texts = [text if isinstance(text, str) else str(text[0]["content"]) for text in completions]
        samples = [Sample(text, row) for text, row in zip(texts, rows, strict=True)]
        return await rewards_of(self._grader, samples, _LocalHost())


class _LocalHost:
    async def beside(
        self,
        act: Callable[Arguments, Result],
        *args: Arguments.args,
        **keywords: Arguments.kwargs,
    ) -> Result:
        return await asyncio.to_thread(act, *args, **keywords)

    async def ask(self, question: Question) -> Answer:
        raise GradingError(f"there is no judge {question.model!r}", "model_grader_server_error")

    async def run(self, source: str, sample: Sample) -> float:
        return await asyncio.to_thread(run_grader, source, sample)
