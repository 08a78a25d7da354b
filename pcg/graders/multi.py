"""The grader `multi`: a formula of other graders' rewards."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from pcg.graders.formula import Formula
from pcg.graders.grader import Grader, Score
from pcg.graders.host import GradingHost
from pcg.graders.sample import Sample

MOST_GRADERS = 16


@dataclass(frozen=True)
class Multi(Grader):
    """A formula of graders, each by its key.

    Where one of them fails, so does it: what a formula makes of a missing reward says nothing.
    """

    type: ClassVar[str] = "multi"
    fields: ClassVar[tuple[str, ...]] = ("type", "name", "graders", "calculate_output")

    name: str
    graders: Mapping[str, Grader]
    formula: Formula

    @property
    def parts(self) -> tuple[Grader, ...]:
        return tuple(self.graders.values())

    async def score(self, sample: Sample, host: GradingHost) -> Score:
        grades = await asyncio.gather(*(one.grade(sample, host) for one in self.parts))
        subs = dict(zip(self.graders, grades, strict=True))
        tokens: Counter[str] = Counter()
        for grade in grades:
            tokens.update(grade.tokens)
        failures = tuple(failure for grade in grades for failure in grade.failures)
        if failures:
            return Score(0.0, subs, tokens, failures)
        reward = self.formula.compute({name: grade.reward for name, grade in subs.items()})
        return Score(reward, subs, tokens)
