r"""Log-probabilities in replies.

Texts of single tokens, for logprobs.

A token's text is what it adds behind another one, so that a word keeps its space. The bytes of a
token that is a part of a character are written out, as OpenAI does: `bytes:\xe2\x80`.

Logprobs on the wire: OpenAI's of completions, and vLLM's of prompts.

The log-probability of a token is the same number wherever it stands, so that a client can compare
it with the likeliest's.

Logprobs in the shape of chats: for each token its text, its bytes and the likeliest tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel
from tokenizers import pre_tokenizers

from pcg.runtime.sampling.logprobs import TokenLogprobs
from pcg.runtime.text.tokenizer import Tokenizer

# -------------------------------------------------------------------------------------- token texts


_REPLACEMENT = "\ufffd"
_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenTexts:
    """Texts and bytes of a tokenizer's tokens, each found once.

    Args:
        tokenizer: None for a model without one, whose tokens have no text.
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
        """Return the text of a token."""
        found = self._texts.get(token)
        if found is None:
            found = self._texts[token] = self._text(token)
        return found

    def _text(self, token: int) -> str:
        plain = self._decoded(token)
        if _REPLACEMENT not in plain:
            return plain
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.bytes(token))

    def _decoded(self, token: int) -> str:
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode((*self._before, token), False)[self._skip :]

    def bytes(self, token: int) -> list[int]:
        """Return the bytes of a token, which may be a part of a character."""
        found = self._bytes.get(token)
        if found is None:
            found = self._bytes[token] = self._bytes_of(token)
        return found

    def _bytes_of(self, token: int) -> list[int]:
        plain = self._decoded(token)
        if _REPLACEMENT not in plain or self._tokenizer is None:
            return list(plain.encode())
        name = str(self._tokenizer.backend.id_to_token(token))
        byte = _FALLBACK.fullmatch(name)
        if byte:
            return [int(byte[1], 16)]
        if all(letter in _LETTERS for letter in name):
            return [_LETTERS[letter] for letter in name]
        return list(plain.encode())


def _letters() -> dict[str, int]:
    """Return the bytes that letters stand for in byte-level tokenizers, as GPT-2 has them."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others: Any = (byte for byte in range(256) if byte not in shown)
    found = {chr(byte): byte for byte in shown}
    found |= {chr(256 + place): byte for place, byte in enumerate(others)}
    assert set(found) == set(pre_tokenizers.ByteLevel.alphabet())
    return found


_LETTERS = _letters()


# ----------------------------------------------------------------------------------------- logprobs


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


# ----------------------------------------------------------------------------------------- logprobs


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
