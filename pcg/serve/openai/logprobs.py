"""Logprobs on the wire: OpenAI's of completions, and vLLM's of prompts.

The log-probability of a token is the same number wherever it stands, so that a client can compare
it with the likeliest's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel

from pcg.runtime.sampling.logprobs import TokenLogprobs
from pcg.serve.openai.token_texts import TokenTexts

_LEAST = -9999.0
"""JSON has no infinity; vLLM's number for it."""


class CompletionLogprobs(BaseModel):
    """Logprobs of a completion's tokens; of a prompt's first token they are null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TokenNames:
    """The names of tokens in logprobs: their texts, or `token_id:7` where a request asks for it."""

    def __init__(self, texts: TokenTexts, as_ids: bool) -> None:
        self._texts = texts
        self._as_ids = as_ids

    def __call__(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self._texts.text(token)


def number(logprob: float) -> float:
    """Return a log-probability as JSON can hold it."""
    return max(logprob, _LEAST)


def completion_logprobs(
    tokens: Iterable[tuple[int, TokenLogprobs | None]], offsets: Iterable[int], name: TokenNames
) -> dict[str, Any]:
    """Return the logprobs of a completion's tokens, as JSON.

    Args:
        tokens: ids with their logprobs; None for a prompt's first.
        offsets: the place of each in the text.
    """
    names: list[str] = []
    chosen: list[float | None] = []
    top: list[dict[str, float] | None] = []
    for token, found in tokens:
        names.append(name(token))
        if found is None:
            chosen.append(None)
            top.append(None)
            continue
        chosen.append(number(found.logprob))
        likeliest: dict[str, float] = {}
        for other, logprob in (*found.top, (found.token_id, found.logprob)):
            likeliest.setdefault(name(other), number(logprob))
        top.append(likeliest)
    return {
        "tokens": names,
        "token_logprobs": chosen,
        "top_logprobs": top,
        "text_offset": list(offsets),
    }


def prompt_logprobs(
    found: Iterable[TokenLogprobs | None], texts: TokenTexts
) -> list[dict[str, dict[str, Any]] | None]:
    """Return the logprobs of a prompt's tokens as vLLM has them: by token id, as JSON."""
    return [None if one is None else _by_id(one, texts) for one in found]


def _by_id(one: TokenLogprobs, texts: TokenTexts) -> dict[str, dict[str, Any]]:
    entries: dict[str, dict[str, Any]] = {}
    for rank, (token, logprob) in enumerate(one.top, 1):
        entries[str(token)] = _entry(logprob, rank, texts.text(token))
    text = texts.text(one.token_id)
    entries.setdefault(str(one.token_id), _entry(one.logprob, one.rank, text))
    return entries


def _entry(logprob: float, rank: int, text: str) -> dict[str, Any]:
    return {"logprob": number(logprob), "rank": rank, "decoded_token": text}
