"""Graders in general: a grader, the grade that it gives, and the host that it needs."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ParamSpec, Protocol, TypeVar

from msgspec import Meta, Struct

from pcg.errors import GradingError
from pcg.graders.sample import Sample

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Question:
    """A question to a judge.

    Attributes:
        model: the judge's name.
        messages: a chat, each with `role` and `content`.
        sampling: `max_new_tokens`, `temperature`, `top_p` and `seed`, where given.
        schema: the JSON schema of the answer.
        choices: the possible answers, instead of a schema.
        reasoning_effort: a word for the chat template; None to leave it out.
    """

    model: str
    messages: Sequence[Mapping[str, str]]
    sampling: Mapping[str, Any] = field(default_factory=dict)
    schema: Mapping[str, Any] | None = None
    choices: Sequence[str] | None = None
    reasoning_effort: str | None = None


@dataclass(frozen=True)
class Answer:
    """The answer of a judge; `tokens` are those of question and answer."""

    text: str
    tokens: int


class GradingHost(Protocol):
    """The services that a grader needs: threads, judges, and a sandbox."""

    async def beside(
        self,
        act: Callable[Arguments, Result],
        *args: Arguments.args,
        **keywords: Arguments.kwargs,
    ) -> Result:
        """Run a function that takes time on another thread."""
        ...

    async def ask(self, question: Question) -> Answer:
        """Ask a judge. GradingError: it cannot answer."""
        ...

    async def run(self, source: str, sample: Sample) -> float:
        """Run `grade(sample, item)` of a source in a sandbox.

        GradingError: it fails, or is not allowed to run.
        """
        ...


@dataclass(frozen=True)
class Failure:
    """The reason why a sample has no grade; `kind` is OpenAI's name of it."""

    kind: str
    text: str


@dataclass(frozen=True)
class Grade:
    """The grade of a sample; with a failure the reward is 0.

    Attributes:
        subs: the grades that it was computed from, by name.
        tokens: the tokens of judges, by model.
        seconds: the time of grading.
    """

    grader: Grader
    reward: float
    subs: Mapping[str, Grade] = field(default_factory=dict)
    tokens: Mapping[str, int] = field(default_factory=dict)
    failures: tuple[Failure, ...] = ()
    seconds: float = 0.0


class Grader(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    """A grader; its fields are those of OpenAI's JSON, and `type` is its tag."""

    name: Annotated[str, Meta(max_length=128)]

    @property
    def type(self) -> str:
        """OpenAI's name of the kind of grader."""
        return str(self.__struct_config__.tag)

    @property
    def parts(self) -> tuple[Grader, ...]:
        """The graders of which a formula is computed."""
        return ()

    @property
    def judge(self) -> str | None:
        """The model of the judge; None for a grader without a judge."""
        return None

    async def score(self, sample: Sample, host: GradingHost) -> Grade:
        """Grade a sample. GradingError: it cannot be graded."""
        raise NotImplementedError

    async def grade(self, sample: Sample, host: GradingHost) -> Grade:
        """Grade a sample; a failure is in the grade."""
        began = time.monotonic()
        try:
            grade = await self.score(sample, host)
            if not math.isfinite(grade.reward):
                raise GradingError(f"the reward is {grade.reward}", "other_error")
        except GradingError as error:
            grade = Grade(self, 0.0, failures=(Failure(error.kind, str(error)),))
        return dataclasses.replace(grade, seconds=time.monotonic() - began)


def all_of(grader: Grader) -> Iterator[Grader]:
    """Yield a grader and all of its parts, recursively."""
    yield grader
    for part in grader.parts:
        yield from all_of(part)
