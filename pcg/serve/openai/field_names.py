"""Errors in the words of the client: fields have other names on the wire than in the engine.

max_new_tokens      max_tokens, max_completion_tokens, max_output_tokens
guided_json, …      response_format, structured_outputs.json, text.format, …
logprobs            top_logprobs in chats
ttft_slo_s=0.05     ttft_slo_ms=50
a prompt            prompt, messages, input
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from pcg.errors import GenerationError
from pcg.runtime.requests.request import RequestFields
from pcg.serve.errors import ApiError, as_api_error

_FIELD = "|".join(sorted(RequestFields.__annotations__, key=len, reverse=True))
_WORD = re.compile(rf"(?<!\w)(?:'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")|\b({_FIELD})\b")
"""A value in quotation marks, which stays as it is, or a field's name."""
_REFUSED = re.compile(rf"(?:an? \w+ of )?({_FIELD})\b")
"""The beginning of a message that refuses a field's value."""
_SLO = re.compile(r"\b([a-z]+_slo)_s=([-+.\w]+)")
"""An SLO and its seconds; the wire has milliseconds."""
_SLO_NAMES = {"ttft_slo_s": "ttft_slo_ms", "tpot_slo_s": "tpot_slo_ms"}
_PROMPT = re.compile(r"(?:request '[^']*-(\d+)'|prompt (\d+))(?= )|the text (?=has)")
"""The beginning of one that refuses a prompt."""
_OF_SCHEMA = re.compile(r"cannot be followed: .*failed to compile JSON schema: (.*?)( \d+ \|.*|)$")
"""The library's reason within a grammar, with the lines of the grammar behind it."""


@dataclass(frozen=True)
class FieldNames:
    """The names that a client gave to what it sent.

    Attributes:
        prompt: the field that the prompt is made of.
        names: fields by the engine's names, where they differ.
        words: texts that stand for some of these in messages.
    """

    prompt: str = "prompt"
    names: Mapping[str, str] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)

    def with_tools(self, words: str) -> FieldNames:
        """Return the names where a grammar is made of the request's tools, which `words` call."""
        return replace(
            self,
            names={**self.names, "guided_grammar": "tools"},
            words={**self.words, "guided_grammar": words},
        )

    def named(self, error: Exception) -> Exception:
        """Return an error in the client's words; errors of no field and no prompt as they are."""
        if not isinstance(error, GenerationError | ApiError):
            return error
        given = as_api_error(error)
        message, param = _OF_SCHEMA.sub(r"cannot be followed: \1", given.detail), given.param
        if found := _PROMPT.match(message):
            if number := found[1] or found[2]:
                message = f"{self.prompt} {number}{message[found.end() :]}"
            param = self.prompt
        elif found := _REFUSED.match(message):
            param = param or found[1]
        names = {**_SLO_NAMES, **self.names}
        param = self.prompt if param == "prompt" else names.get(param or "", param)
        message = _SLO.sub(_in_milliseconds, message)
        return ApiError(
            given.status_code,
            _WORD.sub(self._word, message),
            param=param,
            code=given.code,
            type=given.type,
            headers=given.headers,
        )

    def _word(self, found: re.Match[str]) -> str:
        name = found[1]
        return found[0] if name is None else self.words.get(name) or self.names.get(name, name)

    @contextlib.contextmanager
    def naming(self) -> Iterator[None]:
        """Raise what is raised within in the client's words."""
        try:
            yield
        except (GenerationError, ApiError) as error:
            raise self.named(error) from error


def _in_milliseconds(found: re.Match[str]) -> str:
    return f"{found[1]}_ms={float(found[2]) * 1e3:g}"
