"""Graders read from JSON, as OpenAI has them."""

from __future__ import annotations

from typing import Any, TypeAlias

from pcg.errors import GraderError
from pcg.graders.fields import Fields
from pcg.graders.formula import MOST_CHARACTERS, Formula
from pcg.graders.grader import Grader
from pcg.graders.model_graders import LabelModel, ScoreModel
from pcg.graders.multi import MOST_GRADERS, Multi
from pcg.graders.python_grader import PythonGrader
from pcg.graders.string_check import StringCheck
from pcg.graders.text_similarity import TextSimilarity

_Single: TypeAlias = (
    type[StringCheck] | type[TextSimilarity] | type[PythonGrader] | type[ScoreModel]
    | type[LabelModel]
)  # fmt: skip
_SINGLE: dict[str, _Single] = {
    kind.type: kind for kind in (StringCheck, TextSimilarity, PythonGrader, ScoreModel, LabelModel)
}
_MOST_KEY = 64


def grader_from(given: Any, where: str = "grader") -> Grader:
    """Return the grader that some JSON says.

    Args:
        where: its place, which errors name.
    Raises:
        GraderError: it cannot be; which field, and why.
    """
    kind = _kind(given, where)
    return _multi(given, where) if kind == Multi.type else _single(given, where)


def _kind(given: Any, where: str) -> str:
    if not isinstance(given, dict):
        raise GraderError(f"{where} has to be an object, with its type and name")
    kind = given.get("type")
    known = (*_SINGLE, Multi.type)
    if not isinstance(kind, str) or kind not in known:
        shown = repr(kind)[:64]
        raise GraderError(f"{where}.type={shown}; use {', '.join(known)}")
    return kind


def _single(given: Any, where: str) -> Grader:
    kind = _kind(given, where)
    if kind == Multi.type:
        raise GraderError(f"{where} is a multi grader in another one; give its graders there")
    found = _SINGLE[kind]
    return found.read(Fields.of(given, where, found.fields))


def _multi(given: Any, where: str) -> Grader:
    fields = Fields.of(given, where, Multi.fields)
    inner, place = fields.required("graders"), f"{where}.graders"
    if not isinstance(inner, dict):
        raise GraderError(f"{place} has to be an object of graders by name")
    if isinstance(inner.get("type"), str):  # one grader, by its own name
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
        graders = {name: _single(one, f"{place}.{name}") for name, one in inner.items()}
    text = fields.text("calculate_output", MOST_CHARACTERS)
    formula = Formula.of(text, f"{where}.calculate_output", graders)
    return Multi(fields.name(), graders, formula)
