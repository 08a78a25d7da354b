"""Graders in general: what each has, and the grade that it gives."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from pcg.errors import GradingError
from pcg.graders.host import GradingHost
from pcg.graders.sample import Sample


@dataclass(frozen=True)
class Failure:
    """The reason why a sample has no grade; `kind` is OpenAI's name of it."""

    kind: str
    text: str


@dataclass(frozen=True)
class Score:
    """The score of a sample, before it is a grade.

    Attributes:
        subs: grades that it was made of, by name.
        tokens: the tokens of judges, by model.
        failures: the reasons of grades among `subs` that failed.
    """

    reward: float
    subs: Mapping[str, Grade] = field(default_factory=dict)
    tokens: Mapping[str, int] = field(default_factory=dict)
    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True)
class Grade:
    """The grade of a sample; with a failure the reward is 0.

    Attributes:
        grader: what gave it.
        seconds: the time that it took.
    """

    grader: Grader
    reward: float
    seconds: float
    subs: Mapping[str, Grade] = field(default_factory=dict)
    tokens: Mapping[str, int] = field(default_factory=dict)
    failures: tuple[Failure, ...] = ()


class Grader(ABC):
    """A grader.

    Attributes:
        type: OpenAI's name of its kind.
        name: its own name.
    """

    type: ClassVar[str]
    name: str

    @abstractmethod
    async def score(self, sample: Sample, host: GradingHost) -> Score:
        """Score a sample. GradingError: it cannot be scored."""

    @property
    def parts(self) -> tuple[Grader, ...]:
        """The graders that it is made of."""
        return ()

    @property
    def judge(self) -> str | None:
        """The model that it asks; None for a grader without one."""
        return None

    async def grade(self, sample: Sample, host: GradingHost) -> Grade:
        """Grade a sample; a failure is in the grade."""
        began = time.monotonic()
        try:
            found = await self.score(sample, host)
            if not math.isfinite(found.reward):
                raise GradingError(f"the reward is {found.reward}", "other_error")
        except GradingError as error:
            found = Score(0.0, failures=(Failure(error.kind, str(error)),))
        seconds = time.monotonic() - began
        return Grade(self, found.reward, seconds, found.subs, found.tokens, found.failures)


def all_of(grader: Grader) -> Iterator[Grader]:
    """Yield a grader and all that it is made of."""
    yield grader
    for part in grader.parts:
        yield from all_of(part)
