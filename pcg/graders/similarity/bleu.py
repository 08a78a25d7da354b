"""BLEU of a sentence (Papineni et al. 2002), as sacrebleu's `sentence_bleu` has it, over 100.

    BLEU = min(1, exp(1 - r / c)) · (p_1 … p_N)^(1/N)

with c and r the lengths, p_n the precision of n-grams, and N = 4, or as many as the text has words.
A precision of 0 is 1 / (2^k · n-grams) for the k-th such n (Chen & Cherry 2014, method 3). Words
are parted as mteval-v13a does.
"""

from __future__ import annotations

import math
import re

from pcg.graders.similarity.counts import ngrams, shared

_LONGEST = 4
_ENTITIES = (("&quot;", '"'), ("&amp;", "&"), ("&lt;", "<"), ("&gt;", ">"))
_PARTED = (
    (re.compile(r"([\{-\~\[-\` -\&\(-\+\:-\@\/])"), r" \1 "),
    (re.compile(r"([^0-9])([\.,])"), r"\1 \2 "),
    (re.compile(r"([\.,])([^0-9])"), r" \1 \2"),
    (re.compile(r"([0-9])(-)"), r"\1 \2 "),
)


def bleu(text: str, reference: str) -> float:
    """Return the BLEU of a text."""
    one, other = _words(text), _words(reference)
    logs, zeros, found = [], 0, False
    for n in range(1, _LONGEST + 1):
        of_text = ngrams(one, n)
        total = of_text.total()
        if not total:
            break
        common = shared(of_text, ngrams(other, n))
        found = found or common > 0
        if not common:
            zeros += 1
        logs.append(math.log(common / total if common else 1 / (2**zeros * total)))
    if not found:
        return 0.0
    brevity = min(0.0, 1 - len(other) / len(one))
    return math.exp(brevity + sum(logs) / len(logs))


def _words(text: str) -> list[str]:
    text = text.rstrip().replace("<skipped>", "").replace("-\n", "").replace("\n", " ")
    for entity, character in _ENTITIES:
        text = text.replace(entity, character)
    text = f" {text} "
    for pattern, parted in _PARTED:
        text = pattern.sub(parted, text)
    return text.split()
