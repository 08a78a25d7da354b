"""Lark's notation of a model's texts and marker tokens, as grammars of tool calls use it."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass

from pcg.runtime.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Notation:
    """Notes texts for one tokenizer.

    Attributes:
        tokens: ids of the tokens that were added to the vocabulary, which no rule can spell.
        special: those that texts leave out, as the end of a turn.
    """

    tokens: dict[str, int]
    special: frozenset[str]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Notation:
        """Return the notation for a tokenizer."""
        added = tokenizer.backend.get_added_tokens_decoder()
        special = frozenset(token.content for token in added.values() if token.special)
        return cls({token.content: index for index, token in added.items()}, special)

    def free_tokens(self, markers: Collection[str]) -> list[int]:
        """Return the tokens that may stand in a text: neither special nor among the markers."""
        kept_out = {*self.special, *markers}
        return sorted(index for text, index in self.tokens.items() if text not in kept_out)

    def text(self, text: str) -> str:
        """Return a text as a rule's part."""
        return json.dumps(text)

    def json_text(self, text: str) -> str:
        """Return the JSON of a text, as a part of a rule's text."""
        return json.dumps(text, ensure_ascii=False)

    def marker(self, text: str) -> str:
        """Return a marker, as its token if it is one."""
        return f"<[{self.tokens[text]}]>" if text in self.tokens else self.text(text)

    def is_token(self, text: str) -> bool:
        """Return True if a marker is a token of its own."""
        return text in self.tokens
