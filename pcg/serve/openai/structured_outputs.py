"""The shape of outputs, as bodies ask for it: vLLM's `structured_outputs` and its older fields.

One constraint a request. What a schema, a regex or a grammar may have is `pcg.runtime.guided`'s.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

from pydantic import Field

from pcg.serve.errors import ApiError
from pcg.serve.openai.wire import WireModel

Choices = Annotated[list[str], Field(min_length=1)]


class StructuredOutputs(WireModel):
    """The constraint of an output: one of these."""

    json_schema: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None


class GivenGuide(NamedTuple):
    """A constraint: the client's name of it, the engine's, and what it says."""

    name: str
    field: str
    value: Any


class GuidedFields(WireModel):
    """Fields of a body that constrain the output."""

    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None

    def guide(self) -> GivenGuide | None:
        """Return the guide of the output; None without.

        ApiError: there are several, or `structured_outputs` has none.
        """
        new = self.structured_outputs or StructuredOutputs()
        pairs = [
            ("structured_outputs.json", "guided_json", new.json_schema),
            ("structured_outputs.regex", "guided_regex", new.regex),
            ("structured_outputs.choice", "guided_choice", new.choice),
            ("structured_outputs.grammar", "guided_grammar", new.grammar),
            ("structured_outputs.json_object", "guided_json_object", new.json_object or None),
            ("guided_json", "guided_json", self.guided_json),
            ("guided_regex", "guided_regex", self.guided_regex),
            ("guided_choice", "guided_choice", self.guided_choice),
            ("guided_grammar", "guided_grammar", self.guided_grammar),
        ]
        given = [GivenGuide(*one) for one in pairs if one[2] is not None]
        if self.structured_outputs is not None and not given:
            raise ApiError(
                400,
                "structured_outputs has no constraint; give it json, regex, choice, grammar or "
                "json_object, or leave it out",
                param="structured_outputs",
            )
        if len(given) > 1:
            names = " and ".join(one.name for one in given)
            raise ApiError(400, f"{names} cannot be given together; give one", param=given[1].name)
        return given[0] if given else None

    def guide_names(self) -> dict[str, str]:
        """Return the client's name of the guide, by the engine's."""
        guide = self.guide()
        if guide is None:
            return {}
        kind = "guided_json" if guide.field == "guided_json_object" else guide.field
        return {guide.field: guide.name, kind: guide.name}
