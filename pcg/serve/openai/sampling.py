"""Sampling and structured outputs on the wire, and their names in the engine.

OpenAI's fields are first, then vLLM's. A null field counts as absent. A request has at most one
constraint; llguidance takes the white space of JSON as options of the schema.
`pcg.runtime.sampling.grammars` lists the supported keywords of schemas, regexes and grammars.

A model's generation_config.json has default sampling parameters, which vLLM's servers also read:

    --generation-config auto     the file in the model's directory
                        vllm     none: temperature 1, no filters, no penalties
                        PATH     a folder with such a file, or the file

As in vLLM, six fields are used, and `do_sample` is ignored. A request's field has precedence. In
vLLM, some configurations' `max_new_tokens` limits all requests; in pcg, it is only a default.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

from fastapi import Request
from pydantic import Field, ValidationError

from pcg.errors import ConfigError
from pcg.files import expanded, is_file, read_json, shown_path
from pcg.runtime.requests.request import RequestFields
from pcg.runtime.sampling.guides import LONGEST_GUIDE, OPTIONS, each_schema
from pcg.serve.http.errors import ApiError
from pcg.serve.http.wire import WireModel
from pcg.serve.openai.wire import AbsentFields, RequestName

FILE = "generation_config.json"
AUTO, NONE = "auto", "vllm"
_NOTES = frozenset(
    {"$comment", "default", "deprecated", "description", "examples", "readOnly", "title"}
    | {"writeOnly"}
)


def bare(schema: Any, param: str) -> Any:
    """Return a schema without descriptions and other annotations, to fit longer schemas in a guide.

    ApiError: it is nested too deeply.
    """

    def without_notes(schema: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in schema.items() if key not in _NOTES}

    return _each(schema, without_notes, param)


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    names = (schema.get("patternProperties"), schema.get("properties"))
    is_open = any(isinstance(properties, Mapping) for properties in names)
    return {"additionalProperties": False, **schema} if is_open else schema


def _each(schema: Any, act: Callable[[dict[str, Any]], Any], param: str) -> Any:
    try:
        return each_schema(schema, act)
    except RecursionError as error:
        raise ApiError(400, "The schema is nested too deeply.", param=param) from error


Choices = Annotated[list[str], Field(min_length=1)]
_KINDS = ("json", "regex", "choice", "grammar", "json_object")


class StructuredOutputs(WireModel):
    """The constraint of an output, and options of JSON.

    Attributes:
        disable_any_whitespace: no white space, not even after a comma or a colon.
        disable_additional_properties: objects with named properties have no other properties.
        whitespace_pattern: a regex of the white space, which may occur once at each position.
    """

    json_schema: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


class Guide(NamedTuple):
    """A constraint: the client's name, the engine's name, and the value."""

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

    @cached_property
    def guide(self) -> Guide | None:
        """The constraint of the output, or None.

        ApiError: there are several, or `structured_outputs` has none.
        """
        nested = self.structured_outputs or StructuredOutputs()
        guides = []
        for kind in _KINDS:
            value = getattr(nested, "json_schema" if kind == "json" else kind)
            guides.append(Guide(f"structured_outputs.{kind}", f"guided_{kind}", value))
        guides += [Guide(n, n, getattr(self, n)) for n in (f"guided_{kind}" for kind in _KINDS[:4])]
        guides = [g for g in guides if g.value is not None and g.value is not False]
        if self.structured_outputs is not None and not guides:
            raise ApiError(
                400,
                "structured_outputs has no constraint; give it json, regex, choice, grammar or "
                "json_object, or leave it out",
                param="structured_outputs",
            )
        if len(guides) > 1:
            raise _together([guide.name for guide in guides])
        return self._with_options(nested, guides[0] if guides else None)

    def _with_options(self, nested: StructuredOutputs, guide: Guide | None) -> Guide | None:
        flexible, pattern = False if nested.disable_any_whitespace else None, "whitespace_pattern"
        options = [
            Guide("structured_outputs.disable_any_whitespace", "whitespace_flexible", flexible),
            Guide("structured_outputs.whitespace_pattern", pattern, nested.whitespace_pattern),
            Guide("guided_whitespace_pattern", pattern, self.guided_whitespace_pattern),
        ]
        options = [option for option in options if option.value is not None]
        names = [option.name for option in options]
        if len(names) > 1:
            raise _together(names)
        if nested.disable_additional_properties:
            names.append("structured_outputs.disable_additional_properties")
        if not names:
            return guide
        if guide is None or guide.field not in ("guided_json", "guided_json_object"):
            message = f"{names[0]} is an option of JSON; give it with a schema"
            raise ApiError(400, message, param=names[0])
        schema: Any = guide.value if guide.field == "guided_json" else {"type": "object"}
        if isinstance(schema, str) and len(schema) <= LONGEST_GUIDE:
            with contextlib.suppress(ValueError, RecursionError):
                schema = json.loads(schema)
        if not isinstance(schema, Mapping) or not isinstance(schema.get(OPTIONS, {}), Mapping):
            return guide  # the engine refuses it
        if nested.disable_additional_properties:
            schema = _each(schema, _closed, guide.name)
        for option in options:
            schema = {**schema, OPTIONS: {option.field: option.value, **schema.get(OPTIONS, {})}}
        return Guide(guide.name, "guided_json", schema)

    def guide_names(self) -> dict[str, str]:
        guide = self.guide
        if guide is None:
            return {}
        kind = "guided_json" if guide.field == "guided_json_object" else guide.field
        return {guide.field: guide.name, kind: guide.name}


def _together(names: list[str]) -> ApiError:
    message = f"{' and '.join(names)} cannot be given together; give one"
    return ApiError(400, message, param=names[1])


_SLOS = {"ttft_slo_ms": "x-slo-ttft-ms", "tpot_slo_ms": "x-slo-tpot-ms"}
"""Fields of SLOs, and the equivalent headers of llm-d's router."""

_LEAST_MS, _MOST_MS = 1e-6, 1e12
Milliseconds = Annotated[float, Field(ge=_LEAST_MS, lt=_MOST_MS)]
Whole = Annotated[int, Field(ge=0)]
Truncation = Literal[-1] | Annotated[int, Field(ge=1)]
"""Number of a prompt's last tokens to keep; -1 keeps as many as fit."""
Temperature = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
RepetitionPenalty = Annotated[float, Field(ge=0.01, le=100)]
TopK = Annotated[int, Field(ge=-1)]


class SamplingDefaults(WireModel):
    """Values of absent fields."""

    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    min_p: Share | None = None
    repetition_penalty: RepetitionPenalty | None = None
    max_new_tokens: Annotated[int, Field(ge=1)] | None = None


@dataclass(frozen=True)
class GenerationConfig:
    """The default sampling parameters of a server.

    Attributes:
        source: the file; None without a file, or if it has no sampling fields.
        defaults: the fields of the file.
    """

    source: str | None = None
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)

    def __str__(self) -> str:
        if self.source is None:
            return "temperature=1"
        values = self.defaults.model_dump(exclude_none=True)
        return f"{', '.join(f'{name}={value:g}' for name, value in values.items())} ({self.source})"


def read_generation_config(source: str, model: Path | None) -> GenerationConfig:
    """Return the defaults of `--generation-config`.

    Args:
        model: directory of the model, or None.
    Raises:
        ConfigError: the file is missing, or a value is invalid.
    """
    if source == NONE or (source == AUTO and model is None):
        return GenerationConfig()
    is_auto = source == AUTO
    folder = model if is_auto and model is not None else expanded(source)
    path = folder if folder.suffix == ".json" else folder / FILE
    if not is_file(path):
        if is_auto:
            return GenerationConfig()
        raise ConfigError(
            f"no {shown_path(path)}; generation_config is {AUTO!r}, {NONE!r}, or a folder with a "
            f"{FILE}"
        )
    defaults = _defaults(path, read_json(path, ConfigError))
    says_nothing = defaults == SamplingDefaults()
    return GenerationConfig(None if says_nothing else FILE if is_auto else source, defaults)


def _defaults(path: Path, content: Mapping[str, Any]) -> SamplingDefaults:
    known = SamplingDefaults.model_fields
    values = {name: content[name] for name in known if content.get(name) is not None}
    try:
        return SamplingDefaults.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        raise ConfigError(
            f"{shown_path(path)} has {name}={values[name]!r}: {first['msg']}; repair it, or use "
            f"--generation-config {NONE}"
        ) from error


class SamplingBody(GuidedFields, AbsentFields):
    """Sampling parameters and stop conditions of a body."""

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

    def value_of(self, name: str, defaults: SamplingDefaults) -> Any:
        value = getattr(self, name)
        return getattr(defaults, name, None) if value is None else value

    def request_fields(self, request: Request, defaults: SamplingDefaults) -> dict[str, Any]:
        """Return the fields of the engine's requests, without those that the endpoint adds.

        Args:
            request: the HTTP request; its headers may have SLOs.
            defaults: the server's.
        Raises:
            ApiError: fields exclude each other, or a header is not a number.
        """
        fields: dict[str, Any] = {"temperature": 1.0}
        for name in _SHARED:
            value = self.value_of(name, defaults)
            if value is not None:
                fields[name] = value
        if fields.get("top_p") == 0:  # OpenAI's minimum: only the most likely token
            del fields["top_p"]
            fields["temperature"] = 0.0
        if fields.get("top_k", 1) <= 0:
            del fields["top_k"]
        if self.seed is not None:
            fields["seed"] = self.seed % 2**63
        for name, header in _SLOS.items():
            milliseconds = getattr(self, name) or _header(request, header)
            if milliseconds is not None:
                fields[name.replace("_ms", "_s")] = milliseconds / 1e3
        if self.guide is not None:
            fields[self.guide.field] = self.guide.value
        return fields


_SHARED = tuple(
    name
    for name in SamplingBody.model_fields.keys() & RequestFields.__annotations__.keys()
    if not name.startswith("guided_") and name != "request_id"
)
"""Fields with the same name in the engine."""


def of_engine(fields: Mapping[str, Any], names: Mapping[str, Any]) -> RequestFields:
    """Return the engine's fields with `names`, except None values."""
    further = {name: value for name, value in names.items() if value is not None}
    return {**fields, **further}  # type: ignore[typeddict-item]


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


class TextFormat(WireModel):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(WireModel):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(WireModel):
    """A JSON schema. Outputs always follow it, whether or not it is `strict`."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(WireModel):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat: TypeAlias = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]


def content_schema(
    format: ResponseFormat | None, guide: Guide | None, param: str = "response_format"
) -> dict[str, Any] | None:
    """Return the JSON schema of an output's content; None for any text.

    Args:
        guide: the request's other constraint, or None.
        param: the field with the format.
    Raises:
        ApiError: both constrain the output, or the schema is nested too deeply.
    """
    match format:
        case None | TextFormat():
            return None
        case JsonSchemaFormat(json_schema=JsonSchema(schema_=dict() as schema)):
            schema = bare(schema, param)
        case _:
            schema = {"type": "object"}
    if guide is not None:
        message = f"{param} and {guide.name} cannot be given together; give one"
        raise ApiError(400, message, param=param)
    return schema
