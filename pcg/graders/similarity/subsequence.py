"""Longest common subsequences, and the similarity that they give of two texts.

LCS by bits (Hyyrö 2004, "Bit-parallel LCS-length computation revisited"): with V all ones and M[c]
the places of c in the first sequence, each entry of the second makes

    U = V & M[c];  V = (V + U) | (V - U)

and the length is the number of zeros of V. One step costs a few operations on a long integer.

fuzzy_match = 2 LCS / (length + length), rapidfuzz's `fuzz.ratio` over 100.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def longest_common(first: Sequence[Hashable], second: Sequence[Hashable]) -> int:
    """Return the length of the longest common subsequence."""
    places: dict[Hashable, int] = {}
    for index, entry in enumerate(first):
        places[entry] = places.get(entry, 0) | (1 << index)
    whole = (1 << len(first)) - 1
    state = whole
    for entry in second:
        used = state & places.get(entry, 0)
        state = ((state + used) | (state - used)) & whole
    return len(first) - state.bit_count()


def fuzzy_match(text: str, reference: str) -> float:
    """Return the share of both texts' characters that are in a common subsequence."""
    total = len(text) + len(reference)
    return 2 * longest_common(text, reference) / total if total else 1.0
