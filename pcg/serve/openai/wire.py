"""Parts of OpenAI's bodies that several endpoints share.

`FieldNames` rewrites errors with the client's field names, which differ from the engine's:

max_new_tokens      max_tokens, max_completion_tokens, max_output_tokens
guided_json, …      response_format, structured_outputs.json, text.format, …
logprobs            top_logprobs in chats
ttft_slo_s=0.05     ttft_slo_ms=50
a prompt            prompt, messages, input

`Only` declares fields of other servers that pcg does not support. It accepts null and default
values, because clients send whole bodies, and refuses every other value by name, because it would
change the answer.

Source: openai 3.54's types of parameters, and the protocol.py files of vllm/entrypoints/openai.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from pydantic import (
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainValidator,
    WithJsonSchema,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from pcg.errors import GenerationError
from pcg.runtime.requests.request import RequestFields
from pcg.serve.http.errors import UNSUPPORTED, ApiError, as_api_error
from pcg.serve.http.wire import WireModel

MOST_PROMPTS = 4096
"""The most prompts of a request; each becomes a request of the engine."""
RequestName = Annotated[str, Field(max_length=128, pattern=r"^[!-~]*$")]
"""A client's request id, which replies and logs contain: visible ASCII."""


class StreamOptions(WireModel):
    """Options of a stream; `include_obfuscation` has no effect."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


def _prompts(value: Any) -> list[str | list[int]]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError("use a text, texts, token ids, or lists of token ids; at least one prompt")
    if _are_ids(value):
        return [value]
    if len(value) > MOST_PROMPTS:
        raise ValueError(f"{len(value)} prompts; use at most {MOST_PROMPTS}")
    if set(map(type, value)) != {str} and not all(map(_are_ids, value)):
        raise ValueError("use a text, texts, token ids, or lists of token ids")
    return value


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int}


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT = {"type": "string", "minLength": 1}
_SEVERAL = {"type": "array", "minItems": 1, "maxItems": MOST_PROMPTS}
_PROMPT_SCHEMA = {"anyOf": [_TEXT, {**_SEVERAL, "items": _TEXT}, _IDS, {**_SEVERAL, "items": _IDS}]}

Prompts = Annotated[list[str | list[int]], PlainValidator(_prompts), WithJsonSchema(_PROMPT_SCHEMA)]
"""A list of prompts: from a text, texts, token ids, or lists of token ids."""


_FIELD = "|".join(sorted(RequestFields.__annotations__, key=len, reverse=True))
_WORD = re.compile(rf"(?<!\w)(?:'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")|\b({_FIELD})\b")
"""A quoted value, which stays unchanged, or a field's name."""
_REFUSED = re.compile(rf"(?:an? \w+ of )?({_FIELD})\b")
"""Start of a message that refuses a field's value."""
_SLO = re.compile(r"\b([a-z]+_slo)_s=([-+.\w]+)")
"""An SLO in seconds; the wire has milliseconds."""
_SLO_NAMES = {"ttft_slo_s": "ttft_slo_ms", "tpot_slo_s": "tpot_slo_ms"}
_PROMPT = re.compile(r"(?:request '[^']*-(\d+)'|prompt (\d+))(?= )|the text (?=has)")
"""Start of a message that refuses a prompt."""
_OF_SCHEMA = re.compile(r"cannot be followed: .*failed to compile JSON schema: (.*?)( \d+ \|.*|)$")
"""The library's reason for refusing a schema in a grammar, followed by lines of the grammar."""


@dataclass(frozen=True)
class FieldNames:
    """The client's names of fields.

    Attributes:
        prompt: the field that becomes the prompt.
        names: the client's names by the engine's names, if different.
        words: texts that replace some of these names in messages.
    """

    prompt: str = "prompt"
    names: Mapping[str, str] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)

    def with_tools(self, words: str) -> FieldNames:
        """Return the names for a request with a grammar from its tools, which `words` names."""
        return replace(
            self,
            names={**self.names, "guided_grammar": "tools"},
            words={**self.words, "guided_grammar": words},
        )

    def named(self, error: Exception) -> Exception:
        """Rewrite an error with the client's names; return other errors unchanged."""
        if not isinstance(error, GenerationError | ApiError):
            return error
        refusal = as_api_error(error)
        message, param = _OF_SCHEMA.sub(r"cannot be followed: \1", refusal.detail), refusal.param
        if of_prompt := _PROMPT.match(message):
            if number := of_prompt[1] or of_prompt[2]:
                message = f"{self.prompt} {number}{message[of_prompt.end() :]}"
            param = self.prompt
        elif of_field := _REFUSED.match(message):
            param = param or of_field[1]
        names = {**_SLO_NAMES, **self.names}
        param = self.prompt if param == "prompt" else names.get(param or "", param)
        message = _SLO.sub(lambda slo: f"{slo[1]}_ms={float(slo[2]) * 1e3:g}", message)
        return ApiError(
            refusal.status_code,
            _WORD.sub(self._word, message),
            param=param,
            code=refusal.code,
            type=refusal.type,
            headers=refusal.headers,
        )

    def _word(self, match: re.Match[str]) -> str:
        name = match[1]
        return match[0] if name is None else self.words.get(name) or self.names.get(name, name)

    @contextlib.contextmanager
    def naming(self) -> Iterator[None]:
        """Rewrite errors of the `with` with the client's names."""
        try:
            yield
        except (GenerationError, ApiError) as error:
            raise self.named(error) from error


@dataclass(frozen=True, eq=False)  # 1 == True, so equal instances would be merged
class Only:
    """The annotation of a field that accepts null and a few other values, all as None."""

    values: tuple[Any, ...]

    def __get_pydantic_core_schema__(self, _: Any, __: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._checked)

    def __get_pydantic_json_schema__(
        self, _: CoreSchema, __: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"enum": [None, *self.values]}

    def _checked(self, value: Any) -> None:
        is_bool = isinstance(value, bool)
        for accepted in (None, *self.values):
            if value == accepted and is_bool is isinstance(accepted, bool):
                return
        fixes = ["leave it out", *(f"send {json.dumps(accepted)}" for accepted in self.values)]
        raise PydanticCustomError(UNSUPPORTED, "{fix}", {"fix": " or ".join(fixes)})


Nothing = Annotated[Any, Only(())]
Empty = Annotated[Any, Only(([],))]
EmptyObject = Annotated[Any, Only(({},))]
Off = Annotated[Any, Only((False,))]
On = Annotated[Any, Only((True,))]
One = Annotated[Any, Only((1,))]


class AbsentFields(WireModel):
    """Unsupported fields of vLLM's bodies; `session_id` has no effect."""

    ec_transfer_params: Nothing = None
    early_stopping: Off = None
    guided_decoding_backend: Nothing = None
    kv_transfer_params: Nothing = None
    length_penalty: One = None
    logits_processors: Empty = None
    logprob_token_ids: Nothing = None
    mm_processor_kwargs: Nothing = None
    repetition_detection: Nothing = None
    return_mm_kwargs: On = None
    return_token_offsets: Off = None
    routed_experts_prompt_start: Annotated[Any, Only((0,))] = None
    session_id: str | None = None
    spaces_between_special_tokens: On = None
    stream_interval: One = None
    thinking_token_budget: Annotated[Any, Only((-1,))] = None
    truncation_side: Annotated[Any, Only(("left",))] = None
    use_beam_search: Off = None
    vllm_xargs: EmptyObject = None
    watermarking: Off = None
