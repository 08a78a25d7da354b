"""Fields of sampling and of structured outputs.

JSON schemas as bodies have them, on their way to guides.

The shape of outputs, as bodies ask for it: vLLM's `structured_outputs` and its older fields.

One constraint a request, and for JSON its white space, which llguidance has as options of a schema.
What a schema, a regex or a grammar may have is `pcg.runtime.sampling.guide`'s.

Sampling on the wire: the fields that completions and chats share, by the engine's names.

OpenAI's fields first, then vLLM's. A field that is null is as if it were left out.

Response formats on the wire: text, a JSON object, or JSON of a schema.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

from fastapi import Request
from pydantic import Field

from pcg.runtime.requests.request import RequestFields
from pcg.runtime.sampling.guide import LONGEST_GUIDE, OPTIONS, each_schema
from pcg.serve.http.errors import ApiError
from pcg.serve.http.wire import WireModel
from pcg.serve.openai.wire import AbsentFields, RequestName

# ------------------------------------------------------------------------------------------ schemas


_NOTES = frozenset(
    {"$comment", "default", "deprecated", "description", "examples", "readOnly", "title"}
    | {"writeOnly"}
)
_NAMING = ("patternProperties", "properties")
"""Keywords that name the properties of an object."""


def bare(schema: Any, param: str) -> Any:
    """Return a schema without descriptions and the like, so that longer ones fit a guide.

    ApiError: it is nested too deeply.
    """
    return _each(schema, _without_notes, param)


def closed(schema: Any, param: str) -> Any:
    """Return a schema whose objects have no properties but those that they name.

    ApiError: it is nested too deeply.
    """
    return _each(schema, _without_additions, param)


def _each(schema: Any, act: Callable[[dict[str, Any]], Any], param: str) -> Any:
    try:
        return each_schema(schema, act)
    except RecursionError as error:
        raise ApiError(400, "The schema is nested too deeply.", param=param) from error


def _without_notes(schema: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key not in _NOTES}


def _without_additions(schema: dict[str, Any]) -> dict[str, Any]:
    names_some = any(isinstance(schema.get(key), Mapping) for key in _NAMING)
    return {"additionalProperties": False, **schema} if names_some else schema


# ------------------------------------------------------------------------------- structured outputs


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


# ---------------------------------------------------------------------------------- sampling fields


_SAME = (
    "bad_words",
    "allowed_token_ids",
    "cache_salt",
    "frequency_penalty",
    "ignore_eos",
    "include_stop_str_in_output",
    "logit_bias",
    "min_p",
    "min_tokens",
    "n",
    "presence_penalty",
    "priority",
    "prompt_logprobs",
    "repetition_penalty",
    "seed",
    "skip_special_tokens",
    "stop",
    "stop_token_ids",
    "top_p",
    "truncate_prompt_tokens",
)
"""Fields that the engine calls as the wire does."""

_SLOS = {"ttft_slo_ms": "x-slo-ttft-ms", "tpot_slo_ms": "x-slo-tpot-ms"}
"""Fields of SLOs, and the headers that say the same, as llm-d's router sends them."""

_LEAST_MS, _MOST_MS = 1e-6, 1e12
Milliseconds = Annotated[float, Field(ge=_LEAST_MS, lt=_MOST_MS)]
Whole = Annotated[int, Field(ge=0)]
Truncation = Literal[-1] | Annotated[int, Field(ge=1)]
"""How many of a prompt's tokens are kept; -1 keeps as many as the model has room for."""


Temperature = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
RepetitionPenalty = Annotated[float, Field(ge=0.01, le=100)]
TopK = Annotated[int, Field(ge=-1)]


class SamplingDefaults(WireModel):
    """Values of fields that a request does not give."""

    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    min_p: Share | None = None
    repetition_penalty: RepetitionPenalty | None = None
    max_new_tokens: Annotated[int, Field(ge=1)] | None = None


class SamplingBody(GuidedFields, AbsentFields):
    """Fields of a body that say how tokens are chosen, and when the output ends."""

    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, float] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None

    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    cache_salt: str | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    min_p: Share | None = None
    min_tokens: Whole | None = None
    priority: int | None = None
    prompt_logprobs: Whole | None = None
    repetition_penalty: RepetitionPenalty | None = None
    request_id: RequestName | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    skip_special_tokens: bool | None = None
    stop_token_ids: list[int] | None = None
    top_k: TopK | None = None
    truncate_prompt_tokens: Truncation | None = None

    ttft_slo_ms: Milliseconds | None = None
    tpot_slo_ms: Milliseconds | None = None

    def given(self, name: str, defaults: SamplingDefaults) -> Any:
        """Return a field's value; the server's default where there is none."""
        value = getattr(self, name)
        return getattr(defaults, name, None) if value is None else value

    def request_fields(self, request: Request, defaults: SamplingDefaults) -> RequestFields:
        """Return the fields of the engine's requests, but for what the endpoint adds.

        Args:
            request: the HTTP request, whose headers may have SLOs.
            defaults: the server's.
        Raises:
            ApiError: fields that do not go together, or a header that is no number.
        """
        found: dict[str, Any] = {
            name: value for name in _SAME if (value := self.given(name, defaults)) is not None
        }
        temperature = self.given("temperature", defaults)
        found["temperature"] = 1.0 if temperature is None else temperature
        if found.get("top_p") == 0:  # OpenAI's least: the likeliest token alone
            del found["top_p"]
            found["temperature"] = 0.0
        top_k = self.given("top_k", defaults)
        if top_k is not None and top_k > 0:
            found["top_k"] = top_k
        if isinstance(self.seed, int):
            found["seed"] = self.seed % 2**63
        for name, header in _SLOS.items():
            milliseconds = getattr(self, name) or _header(request, header)
            if milliseconds is not None:
                found[name.replace("_ms", "_s")] = milliseconds / 1e3
        guide = self.guide()
        if guide is not None:
            found[guide.field] = guide.value
        return found  # type: ignore[return-value]


def _header(request: Request, name: str) -> float | None:
    text = request.headers.get(name)
    if text is None:
        return None
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not _LEAST_MS <= number < _MOST_MS:
        raise ApiError(400, f"The header {name} is {text[:64]!r}; use milliseconds above 0.")
    return number


# ---------------------------------------------------------------------------------- response format


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
    found = _named_schema(given, param)
    if found is not None and guide is not None:
        raise ApiError(
            400,
            f"{param} and {guide.name} cannot be given together; give one",
            param=param,
        )
    return found


def _named_schema(given: ResponseFormat | None, param: str) -> dict[str, Any] | None:
    match given:
        case JsonSchemaFormat() if given.json_schema.schema_ is not None:
            found: dict[str, Any] = bare(given.json_schema.schema_, param)
            return found
        case JsonObjectFormat() | JsonSchemaFormat():
            return {"type": "object"}
        case _:
            return None
