"""Graders read from OpenAI's JSON, and the grader `multi`: a formula of other graders' rewards."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import msgspec

from pcg.errors import GraderError
from pcg.graders.formula import Formula
from pcg.graders.grader import Grade, Grader, GradingHost
from pcg.graders.model_graders import LabelModel, ScoreModel
from pcg.graders.sample import Sample
from pcg.graders.text_graders import PythonGrader, StringCheck, TextSimilarity

MOST_GRADERS = 16
_MOST_KEY = 64


class Multi(Grader, tag="multi", frozen=True, kw_only=True):
    """A formula of graders, each by its key.

    If a part fails, the formula fails, as it would compute with a missing reward.
    """

    graders: dict[str, Any]
    calculate_output: Any

    @property
    def parts(self) -> tuple[Grader, ...]:
        return tuple(self.graders.values())

    async def score(self, sample: Sample, host: GradingHost) -> Grade:
        grades = await asyncio.gather(*(part.grade(sample, host) for part in self.parts))
        subs = dict(zip(self.graders, grades, strict=True))
        tokens: Counter[str] = Counter()
        for grade in grades:
            tokens.update(grade.tokens)
        failures = tuple(failure for grade in grades for failure in grade.failures)
        if failures:
            return Grade(self, 0.0, subs, tokens, failures)
        rewards = {name: grade.reward for name, grade in subs.items()}
        formula: Formula = self.calculate_output
        return Grade(self, formula.compute(rewards), subs, tokens)


_KINDS: dict[str, type[Grader]] = {
    str(kind.__struct_config__.tag): kind
    for kind in (StringCheck, TextSimilarity, PythonGrader, ScoreModel, LabelModel, Multi)
}


def grader_from(fields: Any, where: str = "grader") -> Grader:
    """Return the grader of some JSON.

    Args:
        where: the grader's place, for errors.
    Raises:
        GraderError: the grader is invalid; names the field and the reason.
    """
    kind = _kind(fields, where)
    return _multi(fields, where) if kind is Multi else _converted(fields, kind, where)


def _kind(fields: Any, where: str) -> type[Grader]:
    if not isinstance(fields, dict):
        raise GraderError(f"{where} has to be an object, with its type and name")
    kind = fields.get("type")
    if not isinstance(kind, str) or kind not in _KINDS:
        shown = repr(kind)[:64]
        raise GraderError(f"{where}.type={shown}; use {', '.join(_KINDS)}")
    return _KINDS[kind]


def _converted(fields: dict[str, Any], kind: type[Grader], where: str) -> Grader:
    try:
        return msgspec.convert(fields, kind, dec_hook=lambda part, value: part(value))
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$")
        raise GraderError(f"{where}{path.rstrip('`')}: {text[:512]}") from None


def _single(fields: Any, where: str) -> Grader:
    kind = _kind(fields, where)
    if kind is Multi:
        raise GraderError(f"{where} is a multi grader in another one; give its graders there")
    return _converted(fields, kind, where)


def _multi(fields: dict[str, Any], where: str) -> Grader:
    inner, place = fields.get("graders"), f"{where}.graders"
    if not isinstance(inner, dict):
        raise GraderError(f"{place} has to be an object of graders by name")
    if isinstance(inner.get("type"), str):  # a single grader with its own name
        graders = {str(inner.get("name", ""))[:_MOST_KEY]: _single(inner, place)}
    else:
        if not 0 < len(inner) <= MOST_GRADERS:
            raise GraderError(f"{place} has {len(inner)} graders; use 1 to {MOST_GRADERS}")
        for name in inner:
            if not name.isidentifier() or len(name) > _MOST_KEY:
                raise GraderError(
                    f"{place} has the name {name[:_MOST_KEY]!r}, which no formula can have; use "
                    f"up to {_MOST_KEY} letters, digits and _"
                )
        graders = {name: _single(part, f"{place}.{name}") for name, part in inner.items()}
    text = fields.get("calculate_output")
    if not isinstance(text, str):
        raise GraderError(f"{where}.calculate_output is missing or no text; give a formula")
    formula = Formula.of(text, f"{where}.calculate_output", graders)
    return _converted({**fields, "graders": graders, "calculate_output": formula}, Multi, where)
