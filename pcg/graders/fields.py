"""Fields of graders as JSON has them, read with errors that name them."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from pcg.errors import GraderError
from pcg.graders.template import Template

MOST_TEXT = 2**16
"""The most characters of a text of a grader."""
_MOST_NAME = 128


@dataclass(frozen=True)
class Fields:
    """The fields of an object.

    Attributes:
        where: its place, which errors name, as `grader.graders.a`.
    """

    given: dict[str, Any]
    where: str

    @classmethod
    def of(cls, given: Any, where: str, names: Collection[str]) -> Fields:
        """Return the fields of an object. GraderError: it has others than `names`."""
        if not isinstance(given, dict):
            raise GraderError(f"{where} is {_kind(given)}; use an object")
        for name in given:
            if name not in names:
                raise GraderError(
                    f"{where}.{str(name)[:64]} is not known; use {', '.join(sorted(names))}"
                )
        return cls(given, where)

    def __contains__(self, name: str) -> bool:
        return self.given.get(name) is not None

    def text(self, name: str, most: int = MOST_TEXT) -> str:
        """Return a text."""
        value = self.required(name)
        if not isinstance(value, str):
            raise GraderError(f"{self.where}.{name} is {_kind(value)}; use a text")
        if len(value) > most:
            raise GraderError(
                f"{self.where}.{name} has {len(value)} characters; use at most {most}"
            )
        return value

    def name(self) -> str:
        """Return the name of a grader."""
        return self.text("name", _MOST_NAME)

    def template(self, name: str) -> Template:
        """Return a template."""
        return Template.of(self.text(name), f"{self.where}.{name}")

    def one_of(self, name: str, words: Collection[str]) -> str:
        """Return one of some words."""
        value = self.text(name, _MOST_NAME)
        if value not in words:
            raise GraderError(f"{self.where}.{name}={value!r}; use {', '.join(words)}")
        return value

    def items(self, name: str, most: int) -> list[Any]:
        """Return a list that has something in it."""
        value = self.required(name)
        if not isinstance(value, list) or not 0 < len(value) <= most:
            raise GraderError(f"{self.where}.{name}: use a list of 1 to {most}")
        return value

    def texts(self, name: str, most: int) -> tuple[str, ...]:
        """Return a list of texts, each once."""
        value = self.items(name, most)
        if not all(isinstance(one, str) and 0 < len(one) <= _MOST_NAME for one in value):
            raise GraderError(f"{self.where}.{name}: use texts of 1 to {_MOST_NAME} characters")
        if len(set(value)) < len(value):
            raise GraderError(f"{self.where}.{name} has a text twice; name each once")
        return tuple(value)

    def number(self, name: str, least: float, most: float) -> float:
        """Return a number within bounds."""
        return number(self.required(name), f"{self.where}.{name}", least, most)

    def whole(self, name: str, least: int, most: int) -> int:
        """Return a whole number within bounds."""
        value = self.number(name, least, most)
        if not value.is_integer():
            raise GraderError(f"{self.where}.{name}={value}; use a whole number")
        return int(value)

    def required(self, name: str) -> Any:
        """Return a value that has to be there."""
        value = self.given.get(name)
        if value is None:
            raise GraderError(f"{self.where}.{name} is missing; give it")
        return value


def number(value: Any, where: str, least: float, most: float) -> float:
    """Return a number. GraderError: it is none, or out of bounds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise GraderError(f"{where} is {_kind(value)}; use a number")
    if not least <= value <= most or math.isnan(value):
        raise GraderError(f"{where} is out of range; use {least} to {most}")
    return float(value)


def _kind(value: Any) -> str:
    return "missing" if value is None else f"of the type {type(value).__name__}"
