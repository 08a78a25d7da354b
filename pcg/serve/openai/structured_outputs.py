"""The shape of outputs, as bodies ask for it: vLLM's `structured_outputs` and its older fields.

One constraint a request, and for JSON its white space, which llguidance has as options of a schema.
What a schema, a regex or a grammar may have is `pcg.runtime.guided`'s.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from pcg.runtime.guided.guide import LONGEST_GUIDE, OPTIONS
from pcg.serve.errors import ApiError
from pcg.serve.openai.chat.schemas import closed
from pcg.serve.openai.wire import WireModel

Choices = Annotated[list[str], Field(min_length=1)]


class StructuredOutputs(WireModel):
    """The constraint of an output: one of these, and options of JSON.

    Attributes:
        disable_any_whitespace: JSON without any, not even behind a comma or a colon.
        disable_additional_properties: objects that name properties have no further ones.
        whitespace_pattern: a regex of the white space that may come, once in each place.
    """

    json_schema: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


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
    guided_whitespace_pattern: str | None = None

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
        return self._with_options(new, given[0] if given else None)

    def _with_options(self, new: StructuredOutputs, given: GivenGuide | None) -> GivenGuide | None:
        """Return a guide whose schema has the options of JSON that are given beside it."""
        given_options: list[tuple[str, str, Any]] = [
            (
                "structured_outputs.disable_any_whitespace",
                "whitespace_flexible",
                False if new.disable_any_whitespace else None,
            ),
            ("structured_outputs.whitespace_pattern", "whitespace_pattern", new.whitespace_pattern),
            ("guided_whitespace_pattern", "whitespace_pattern", self.guided_whitespace_pattern),
        ]
        white_space = [one for one in given_options if one[2] is not None]
        names = [name for name, *_ in white_space]
        if len(names) > 1:
            text = " and ".join(names)
            raise ApiError(400, f"{text} cannot be given together; give one", param=names[1])
        if new.disable_additional_properties:
            names.append("structured_outputs.disable_additional_properties")
        if not names:
            return given
        if given is None or given.field not in ("guided_json", "guided_json_object"):
            raise ApiError(
                400, f"{names[0]} is an option of JSON; give it beside a schema", param=names[0]
            )
        schema = _schema(given)
        if not isinstance(schema, Mapping) or not isinstance(schema.get(OPTIONS, {}), Mapping):
            return given  # what is no schema is refused as a guide
        if new.disable_additional_properties:
            schema = closed(schema, given.name)
        for _, option, value in white_space:
            schema = {**schema, OPTIONS: {option: value, **schema.get(OPTIONS, {})}}
        return GivenGuide(given.name, "guided_json", schema)

    def guide_names(self) -> dict[str, str]:
        """Return the client's name of the guide, by the engine's."""
        guide = self.guide()
        if guide is None:
            return {}
        kind = "guided_json" if guide.field == "guided_json_object" else guide.field
        return {guide.field: guide.name, kind: guide.name}


def _schema(given: GivenGuide) -> Any:
    if given.field == "guided_json_object":
        return {"type": "object"}
    if isinstance(given.value, str) and len(given.value) <= LONGEST_GUIDE:
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(given.value)
    return given.value
