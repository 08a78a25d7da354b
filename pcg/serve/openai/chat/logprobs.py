"""Logprobs in the shape of chats: for each token its text, its bytes and the likeliest tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel

from pcg.runtime.sampling.logprobs import TokenLogprobs
from pcg.serve.openai.logprobs import TokenNames, number
from pcg.serve.openai.token_texts import TokenTexts


class TopLogprob(BaseModel):
    """One of the likeliest tokens."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token of the output."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Logprobs of the tokens of an output."""

    content: list[TokenLogprob]
    refusal: None = None


class LogprobWriter:
    """Writes logprobs as JSON."""

    def __init__(self, texts: TokenTexts, as_ids: bool) -> None:
        self._texts = texts
        self._name = TokenNames(texts, as_ids)

    def tokens(self, found: Iterable[TokenLogprobs]) -> list[dict[str, Any]]:
        """Return the logprobs of tokens."""
        return [
            {
                **self._entry(one.token_id, one.logprob),
                "top_logprobs": [self._entry(token, logprob) for token, logprob in one.top],
            }
            for one in found
        ]

    def content(self, found: Iterable[TokenLogprobs]) -> dict[str, Any]:
        """Return the logprobs of a choice."""
        return {"content": self.tokens(found), "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        name, text_bytes = self._name(token), self._texts.bytes(token)
        return {"token": name, "logprob": number(logprob), "bytes": text_bytes}
