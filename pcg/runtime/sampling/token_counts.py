"""Token counts: how often a request generated each token, for penalties."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class TokenCounts:
    """The tokens of a request, each once, and how often each was generated.

    They are arrays that grow, so that a step reads them without going through the tokens again.
    """

    def __init__(self, prompt_ids: Sequence[int] = ()) -> None:
        """Count nothing yet; the prompt's tokens are there, generated 0 times."""
        self._tokens = np.unique(np.asarray(prompt_ids, dtype=np.int64))
        self._counts = np.zeros(len(self._tokens), dtype=np.float32)
        self._places = {token: place for place, token in enumerate(self._tokens.tolist())}

    def copy(self) -> TokenCounts:
        """Return counts of their own with the same tokens."""
        found = TokenCounts()
        found._tokens, found._counts = self._tokens.copy(), self._counts.copy()
        found._places = self._places.copy()
        return found

    def add(self, token: int) -> None:
        """Count a generated token."""
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._tokens):
            room = max(16, place)
            self._tokens = np.append(self._tokens, np.zeros(room, dtype=np.int64))
            self._counts = np.append(self._counts, np.zeros(room, dtype=np.float32))
        self._tokens[place] = token
        self._counts[place] += 1

    @property
    def tokens(self) -> NDArray[np.int64]:
        return self._tokens[: len(self._places)]

    @property
    def counts(self) -> NDArray[np.float32]:
        """The times that each of `tokens` was generated; 0 for one of the prompt alone."""
        return self._counts[: len(self._places)]
