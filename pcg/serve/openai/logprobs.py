r"""Log-probabilities in replies: OpenAI's for completions and chats, and vLLM's for prompts.

A token's text is the text that it adds after another token, so a word keeps its space. A token that
is a part of a character is written as its bytes, as in OpenAI's API: `bytes:\xe2\x80`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel
from tokenizers import pre_tokenizers

from pcg.runtime.sampling.logprobs import TokenLogprobs
from pcg.runtime.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_LEAST = -9999.0
"""vLLM's number for minus infinity, which JSON does not have."""


class TokenTexts:
    """Texts and bytes of a tokenizer's tokens, each computed once.

    Args:
        tokenizer: None for a model without a tokenizer; tokens then have no text.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}
        self._bytes: dict[int, list[int]] = {}
        self._before: tuple[int, ...] = ()
        self._skip = 0
        if tokenizer is not None:
            self._before = tuple(tokenizer.encode("a", add_special_tokens=False)[-1:])
            self._skip = len(tokenizer.decode(self._before, skip_special_tokens=False))

    def text(self, token: int) -> str:
        text = self._texts.get(token)
        if text is None:
            text = self._decoded(token)
            if _REPLACEMENT in text:
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.bytes(token))
            self._texts[token] = text
        return text

    def bytes(self, token: int) -> list[int]:
        """Return the bytes of a token, which may be a part of a character."""
        values = self._bytes.get(token)
        if values is None:
            values = self._bytes[token] = self._bytes_of(token)
        return values

    def _decoded(self, token: int) -> str:
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode((*self._before, token), False)[self._skip :]

    def _bytes_of(self, token: int) -> list[int]:
        plain = self._decoded(token)
        if _REPLACEMENT in plain and self._tokenizer is not None:
            name = str(self._tokenizer.backend.id_to_token(token))
            byte = _FALLBACK.fullmatch(name)
            if byte:
                return [int(byte[1], 16)]
            if all(letter in _LETTERS for letter in name):
                return [_LETTERS[letter] for letter in name]
        return list(plain.encode())


def _letters() -> dict[str, int]:
    """Return the bytes of the letters of byte-level tokenizers, such as GPT-2's."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in shown]
    letters = {chr(byte): byte for byte in shown}
    letters |= {chr(256 + index): byte for index, byte in enumerate(others)}
    assert set(letters) == set(pre_tokenizers.ByteLevel.alphabet())
    return letters


_LETTERS = _letters()


class CompletionLogprobs(BaseModel):
    """Logprobs of a completion's tokens; null for a prompt's first token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TopLogprob(BaseModel):
    """A top token."""

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
    """Writes logprobs as JSON.

    Args:
        as_ids: True to write `token_id:7` in place of a token's text.
    """

    def __init__(self, texts: TokenTexts, as_ids: bool) -> None:
        self._texts = texts
        self._as_ids = as_ids

    def completion(
        self, tokens: Iterable[tuple[int, TokenLogprobs | None]], offsets: Iterable[int]
    ) -> dict[str, Any]:
        """Return the logprobs of a completion's tokens.

        Args:
            tokens: ids with their logprobs; None for a prompt's first token.
            offsets: position of each token in the text.
        """
        names: list[str] = []
        chosen: list[float | None] = []
        top: list[dict[str, float] | None] = []
        for token, values in tokens:
            names.append(self._name(token))
            if values is None:
                chosen.append(None)
                top.append(None)
                continue
            chosen.append(_number(values.logprob))
            likeliest: dict[str, float] = {}
            for other, logprob in (*values.top, (values.token_id, values.logprob)):
                likeliest.setdefault(self._name(other), _number(logprob))
            top.append(likeliest)
        return {
            "tokens": names,
            "token_logprobs": chosen,
            "top_logprobs": top,
            "text_offset": list(offsets),
        }

    def tokens(self, values: Iterable[TokenLogprobs]) -> list[dict[str, Any]]:
        return [
            {
                **self._entry(value.token_id, value.logprob),
                "top_logprobs": [self._entry(token, logprob) for token, logprob in value.top],
            }
            for value in values
        ]

    def prompt(
        self, values: Iterable[TokenLogprobs | None]
    ) -> list[dict[str, dict[str, Any]] | None]:
        """Return the logprobs of a prompt's tokens by token id, as in vLLM."""
        return [None if value is None else self._by_id(value) for value in values]

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self._texts.text(token)

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        name, text_bytes = self._name(token), self._texts.bytes(token)
        return {"token": name, "logprob": _number(logprob), "bytes": text_bytes}

    def _by_id(self, value: TokenLogprobs) -> dict[str, dict[str, Any]]:
        ranked = [(token, logprob, rank) for rank, (token, logprob) in enumerate(value.top, 1)]
        entries: dict[str, dict[str, Any]] = {}
        for token, logprob, rank in (*ranked, (value.token_id, value.logprob, value.rank)):
            text = self._texts.text(token)
            entry = {"logprob": _number(logprob), "rank": rank, "decoded_token": text}
            entries.setdefault(str(token), entry)
        return entries


def _number(logprob: float) -> float:
    return max(logprob, _LEAST)
