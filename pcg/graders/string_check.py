"""The grader `string_check`: a text is another one, or has it in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pcg.graders.fields import Fields
from pcg.graders.grader import Grader, Score
from pcg.graders.host import GradingHost
from pcg.graders.sample import Sample
from pcg.graders.template import Template

OPERATIONS = ("eq", "ne", "like", "ilike")


@dataclass(frozen=True)
class StringCheck(Grader):
    """A comparison of two texts, which gives 1 or 0.

    Attributes:
        operation: `eq`, the same; `ne`, not the same; `like`, the input has the reference in it;
            `ilike`, the same whatever the case of letters.
    """

    type: ClassVar[str] = "string_check"
    fields: ClassVar[tuple[str, ...]] = ("type", "name", "input", "reference", "operation")

    name: str
    input: Template
    reference: Template
    operation: str

    @classmethod
    def read(cls, given: Fields) -> StringCheck:
        """Return the grader of some fields. GraderError: it cannot be."""
        operation = given.one_of("operation", OPERATIONS)
        return cls(given.name(), given.template("input"), given.template("reference"), operation)

    async def score(self, sample: Sample, host: GradingHost) -> Score:
        return Score(float(await host.beside(self._holds, sample)))

    def _holds(self, sample: Sample) -> bool:
        text, reference = self.input.fill(sample), self.reference.fill(sample)
        match self.operation:
            case "eq":
                return text == reference
            case "ne":
                return text != reference
            case "like":
                return reference in text
            case _:
                return reference.casefold() in text.casefold()
