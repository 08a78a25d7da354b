"""Bad words: sequences of tokens that an output does not have.

The last token of a sequence is removed where the output ends with those before it.

Source: vLLM `apply_bad_words`; transformers `NoBadWordsLogitsProcessor`, which looks at the prompt,
too.
"""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from collections.abc import Sequence

from pcg.errors import GenerationError
from pcg.runtime.text.tokenizer import Tokenizer
from pcg.units import shown

Word = tuple[int, ...]


class BadWords:
    """The bad words of one request, and the end of its output."""

    def __init__(self, words: Sequence[Word]) -> None:
        self._always = [word[0] for word in words if len(word) == 1]
        self._after: dict[int, list[Word]] = defaultdict(list)
        for word in words:
            if len(word) > 1:
                self._after[word[-2]].append(word)
        self._latest: deque[int] = deque(maxlen=max(map(len, words)) - 1)

    def anew(self) -> BadWords:
        """Return the same words for another output, which has no token yet."""
        found = copy.copy(self)
        found._latest = deque(maxlen=self._latest.maxlen)
        return found

    def add(self, token: int) -> None:
        """Note a generated token."""
        self._latest.append(token)

    def tokens(self) -> list[int]:
        """Return the tokens that would end a bad word now."""
        if not self._latest:
            return self._always
        latest = tuple(self._latest)
        words = self._after.get(latest[-1], ())
        return self._always + [w[-1] for w in words if latest[1 - len(w) :] == w[:-1]]


def words_of(bad_words: Sequence[str | Word], tokenizer: Tokenizer | None) -> tuple[Word, ...]:
    """Return bad words as tokens; a text stands for itself, and for itself after a space.

    Raises:
        GenerationError: a text without a tokenizer, or one that has no tokens.
    """
    words: list[Word] = []
    for word in bad_words:
        if isinstance(word, tuple):
            words.append(word)
            continue
        if tokenizer is None:
            raise GenerationError(
                f"bad_words has the text {shown(word)}, and the model came without a "
                "tokenizer.json; give sequences of token ids"
            )
        bare = word.lstrip(" ") or word
        plain = tuple(tokenizer.encode(bare, add_special_tokens=False))
        spaced = tuple(tokenizer.encode(" " + bare, add_special_tokens=False))
        if not plain:
            raise GenerationError(f"bad_words has the text {shown(word)}, which has no tokens")
        words.append(plain)
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            words.append(spaced)
    return tuple(words)
