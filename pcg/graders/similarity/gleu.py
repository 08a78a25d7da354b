"""GLEU (Wu et al. 2016, "Google's neural machine translation system", 4.3).

Of all 1- to 4-grams of the words between spaces, the lesser of precision and recall.
"""

from __future__ import annotations

from pcg.graders.similarity.counts import ngrams, shared

_LONGEST = 4


def gleu(text: str, reference: str) -> float:
    """Return the GLEU of a text."""
    one, other = text.split(), reference.split()
    common = most = 0
    for n in range(1, _LONGEST + 1):
        of_text, of_reference = ngrams(one, n), ngrams(other, n)
        common += shared(of_text, of_reference)
        most += max(of_text.total(), of_reference.total())
    return common / most if most else 0.0
