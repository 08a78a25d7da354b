r"""Texts of single tokens, for logprobs.

A token's text is what it adds behind another one, so that a word keeps its space. The bytes of a
token that is a part of a character are written out, as OpenAI does: `bytes:\xe2\x80`.
"""

from __future__ import annotations

import re
from typing import Any

from tokenizers import pre_tokenizers

from pcg.runtime.text.tokenizer import Tokenizer

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
