"""METEOR (Banerjee & Lavie 2005) of exact words and stems, without WordNet's synonyms.

    F = P R / (0.9 P + 0.1 R),  METEOR = F (1 - 0.5 (chunks / matches)^3)

with P and R the matched shares of the words of the text and of its reference, and chunks the runs
of matches that stand together in both. Words are parted by spaces, in lower case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from pcg.graders.similarity.stems import stem

_PRECISION_WEIGHT, _PENALTY, _STEEPNESS = 0.9, 0.5, 3
_LONGEST_STEMMED = 64


def meteor(text: str, reference: str) -> float:
    """Return the METEOR of a text."""
    one, other = text.lower().split(), reference.lower().split()
    matches = _align(one, other)
    if not matches:
        return 0.0
    precision, recall = len(matches) / len(one), len(matches) / len(other)
    mean = precision * recall / (_PRECISION_WEIGHT * precision + (1 - _PRECISION_WEIGHT) * recall)
    penalty = _PENALTY * (_chunks(matches) / len(matches)) ** _STEEPNESS
    return (1 - penalty) * mean


def _align(one: Sequence[str], other: Sequence[str]) -> list[tuple[int, int]]:
    """Return the places of words that match: exact ones first, then those of one stem."""
    places: list[int] = list(range(len(one)))
    others: list[int] = list(range(len(other)))
    found: list[tuple[int, int]] = []
    forms: tuple[Callable[[str], str], ...] = (str, _stem)
    for form in forms:
        waiting: dict[str, list[int]] = {}
        for j in others:
            waiting.setdefault(form(other[j]), []).append(j)
        candidates = ((i, waiting.get(form(one[i]))) for i in reversed(places))
        found += [(i, there.pop()) for i, there in candidates if there]
        matched, matched_others = {i for i, _ in found}, {j for _, j in found}
        places = [i for i in places if i not in matched]
        others = [j for j in others if j not in matched_others]
    return sorted(found)


def _stem(word: str) -> str:
    return stem(word) if len(word) <= _LONGEST_STEMMED else word


def _chunks(matches: Sequence[tuple[int, int]]) -> int:
    return 1 + sum((i + 1, j + 1) != after for (i, j), after in pairwise(matches))
