"""The grader `python`: a tenant's source, which a host runs in a sandbox or refuses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pcg.errors import GraderError
from pcg.graders.fields import Fields
from pcg.graders.grader import Grader, Score
from pcg.graders.host import GradingHost
from pcg.graders.sample import Sample


@dataclass(frozen=True)
class PythonGrader(Grader):
    """A source that defines `grade(sample, item)`, which returns a number."""

    type: ClassVar[str] = "python"
    fields: ClassVar[tuple[str, ...]] = ("type", "name", "source", "image_tag")

    name: str
    source: str

    @classmethod
    def read(cls, given: Fields) -> PythonGrader:
        """Return the grader of some fields. GraderError: it cannot be."""
        if "image_tag" in given:
            raise GraderError(
                f"{given.where}.image_tag is not supported: graders run with this server's Python; "
                "leave it out"
            )
        source = given.text("source")
        if "\0" in source or any("\ud800" <= one <= "\udfff" for one in source):
            raise GraderError(f"{given.where}.source has characters that no source has")
        return cls(given.name(), source)

    async def score(self, sample: Sample, host: GradingHost) -> Score:
        return Score(await host.run(self.source, sample))
