"""Response formats on the wire: text, a JSON object, or JSON of a schema."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from pcg.serve.errors import ApiError
from pcg.serve.openai.chat.schemas import bare
from pcg.serve.openai.structured_outputs import GivenGuide
from pcg.serve.openai.wire import WireModel


class TextFormat(WireModel):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(WireModel):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(WireModel):
    """A JSON schema. Outputs follow it whether or not it is `strict`."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(WireModel):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat: TypeAlias = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]


def content_schema(
    given: ResponseFormat | None, guide: GivenGuide | None, param: str = "response_format"
) -> dict[str, Any] | None:
    """Return the JSON schema of an output's content; None for any text.

    Args:
        guide: what else of the request constrains the output.
        param: the field that the format is given in.
    Raises:
        ApiError: both are given, or the schema is nested too deeply.
    """
    found = _schema(given, param)
    if found is not None and guide is not None:
        raise ApiError(
            400,
            f"{param} and {guide.name} cannot be given together; give one",
            param=param,
        )
    return found


def _schema(given: ResponseFormat | None, param: str) -> dict[str, Any] | None:
    match given:
        case JsonSchemaFormat() if given.json_schema.schema_ is not None:
            found: dict[str, Any] = bare(given.json_schema.schema_, param)
            return found
        case JsonObjectFormat() | JsonSchemaFormat():
            return {"type": "object"}
        case _:
            return None
