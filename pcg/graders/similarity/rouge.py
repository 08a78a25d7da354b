"""ROUGE (Lin 2004): the F1 of shared n-grams, or of the longest common subsequence of words.

Words are runs of a-z and 0-9 of the text in lower case, as in the package rouge-score: letters
beyond those part words.
"""

from __future__ import annotations

import re

from pcg.graders.similarity.counts import ngrams, shared
from pcg.graders.similarity.subsequence import longest_common

_WORD = re.compile(r"[a-z0-9]+")


def rouge_n(text: str, reference: str, n: int) -> float:
    """Return the F1 of shared n-grams."""
    one, other = ngrams(_words(text), n), ngrams(_words(reference), n)
    return _f1(shared(one, other), one.total(), other.total())


def rouge_l(text: str, reference: str) -> float:
    """Return the F1 of the longest common subsequence of words."""
    one, other = _words(text), _words(reference)
    return _f1(longest_common(one, other), len(one), len(other))


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _f1(common: int, first: int, second: int) -> float:
    return 2 * common / (first + second) if common else 0.0
