"""Sampling on the wire: the fields that completions and chats share, by the engine's names.

OpenAI's fields first, then vLLM's. A field that is null is as if it were left out.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Request
from pydantic import Field

from pcg.runtime.requests.request import RequestFields
from pcg.serve.errors import ApiError
from pcg.serve.openai.absent_fields import AbsentFields
from pcg.serve.openai.structured_outputs import GuidedFields
from pcg.serve.openai.wire import RequestName, WireModel

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
