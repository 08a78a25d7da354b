"""METEOR (Banerjee & Lavie 2005) of exact words and stems, without WordNet's synonyms.

    F = P R / (0.9 P + 0.1 R),  METEOR = F (1 - 0.5 (chunks / matches)^3)

with P and R the matched shares of the words of the text and of its reference, and chunks the runs
of matches that stand together in both. Words are parted by spaces, in lower case.

Stems of English words (Porter 1980, "An algorithm for suffix stripping").

A word is [C](VC)^m[V] of runs of consonants and vowels; rules take suffixes off by the measure m of
what is left. The steps have the paper's numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeAlias

# -------------------------------------------------------------------------------------------- stems


_Rules: TypeAlias = Sequence[tuple[str, str]]

_STEP_2: _Rules = (
    ("ational", "ate"),
    ("tional", "tion"),
    ("enci", "ence"),
    ("anci", "ance"),
    ("izer", "ize"),
    ("abli", "able"),
    ("alli", "al"),
    ("entli", "ent"),
    ("eli", "e"),
    ("ousli", "ous"),
    ("ization", "ize"),
    ("ation", "ate"),
    ("ator", "ate"),
    ("alism", "al"),
    ("iveness", "ive"),
    ("fulness", "ful"),
    ("ousness", "ous"),
    ("aliti", "al"),
    ("iviti", "ive"),
    ("biliti", "ble"),
)
_STEP_3: _Rules = (
    ("icate", "ic"),
    ("ative", ""),
    ("alize", "al"),
    ("iciti", "ic"),
    ("ical", "ic"),
    ("ful", ""),
    ("ness", ""),
)
_STEP_4 = (
    *("al", "ance", "ence", "er", "ic", "able", "ible", "ant", "ement", "ment", "ent", "ion"),
    *("ou", "ism", "ate", "iti", "ous", "ive", "ize"),
)


def stem(word: str) -> str:
    """Return the stem of a word in lower case."""
    word = _plural(word)
    word = _past(word)
    if word.endswith("y") and _has_vowel(word[:-1]):
        word = word[:-1] + "i"
    for rules in (_STEP_2, _STEP_3):
        word = _replaced(word, rules)
    word = _without_suffix(word)
    return _ending(word)


def _shape(word: str) -> str:
    """Return the word with c for each consonant and v for each vowel."""
    shape = ""
    for index, letter in enumerate(word):
        is_vowel = letter in "aeiou" or (letter == "y" and index > 0 and shape[-1] == "c")
        shape += "v" if is_vowel else "c"
    return shape


def _measure(word: str) -> int:
    return len(re.findall("v+c+", _shape(word)))


def _has_vowel(word: str) -> bool:
    return "v" in _shape(word)


def _is_doubled(word: str) -> bool:
    return len(word) > 1 and word[-1] == word[-2] and _shape(word)[-1] == "c"


def _is_short(word: str) -> bool:
    """Return True for an end of consonant, vowel, and a consonant that is not w, x or y."""
    return _shape(word).endswith("cvc") and word[-1] not in "wxy"


def _plural(word: str) -> str:
    for suffix, kept in (("sses", "ss"), ("ies", "i"), ("ss", "ss"), ("s", "")):
        if word.endswith(suffix):
            return word.removesuffix(suffix) + kept
    return word


def _past(word: str) -> str:
    if word.endswith("eed"):
        return word[:-1] if _measure(word[:-3]) else word
    for suffix in ("ed", "ing"):
        left = word.removesuffix(suffix)
        if left != word and _has_vowel(left):
            break
    else:
        return word
    if left.endswith(("at", "bl", "iz")):
        return left + "e"
    if _is_doubled(left) and left[-1] not in "lsz":
        return left[:-1]
    return left + "e" if _measure(left) == 1 and _is_short(left) else left


def _longest(word: str, suffixes: Sequence[str]) -> str | None:
    return max((one for one in suffixes if word.endswith(one)), key=len, default=None)


def _replaced(word: str, rules: _Rules) -> str:
    by_suffix = dict(rules)
    suffix = _longest(word, tuple(by_suffix))
    if suffix is None:
        return word
    left = word.removesuffix(suffix)
    return left + by_suffix[suffix] if _measure(left) else word


def _without_suffix(word: str) -> str:
    suffix = _longest(word, _STEP_4)
    if suffix is None:
        return word
    left = word.removesuffix(suffix)
    may_go = _measure(left) > 1 and (suffix != "ion" or left.endswith(("s", "t")))
    return left if may_go else word


def _ending(word: str) -> str:
    if word.endswith("e"):
        left = word[:-1]
        measure = _measure(left)
        if measure > 1 or (measure == 1 and not _is_short(left)):
            word = left
    if word.endswith("ll") and _measure(word[:-1]) > 1:
        word = word[:-1]
    return word


# ------------------------------------------------------------------------------------------- meteor


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
