"""The graders of texts: `string_check`, `text_similarity`, and `python`, a tenant's source.

The metrics of similarity are those of rapidfuzz, sacrebleu, nltk and rouge-score, which the extra
`graders` installs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

from pcg.errors import GradingError
from pcg.graders.grader import Grade, Grader, GradingHost
from pcg.graders.sample import MOST_TEXT, Sample, Template

MOST_COMPARED = 2**15
"""Characters of a text that is compared: the work grows with the product of both."""
_LONGEST_STEMMED = 64
"""Characters of a word that METEOR stems."""
_LIBRARIES = ("nltk", "rapidfuzz", "rouge_score", "sacrebleu")


class StringCheck(Grader, tag="string_check", frozen=True, kw_only=True):
    """A comparison of two texts, with the reward 1 or 0.

    Attributes:
        operation: `eq`, equal; `ne`, not equal; `like`, the input contains the reference; `ilike`,
            the same without regard to case.
    """

    input: Template
    reference: Template
    operation: str

    def __post_init__(self) -> None:
        require_word("operation", self.operation, ("eq", "ne", "like", "ilike"))

    async def score(self, sample: Sample, host: GradingHost) -> Grade:
        return Grade(self, float(await host.beside(self._holds, sample)))

    def _holds(self, sample: Sample) -> bool:
        text, reference = self.input.fill(sample), self.reference.fill(sample)
        match self.operation:
            case "eq":
                return text == reference
            case "ne":
                return text != reference
            case "like":
                return reference in text
            case _:
                return reference.casefold() in text.casefold()


class TextSimilarity(Grader, tag="text_similarity", frozen=True, kw_only=True):
    """The similarity of two texts, from 0 to 1."""

    input: Template
    reference: Template
    evaluation_metric: str

    def __post_init__(self) -> None:
        if self.evaluation_metric == "cosine":
            raise ValueError(
                "evaluation_metric='cosine' needs embeddings, which graders do not have; use "
                f"{', '.join(METRICS)}"
            )
        require_word("evaluation_metric", self.evaluation_metric, METRICS)
        missing = [name for name in _LIBRARIES if importlib.util.find_spec(name) is None]
        if missing:
            raise ValueError(
                f"the metrics of text_similarity need {', '.join(missing)}, which this machine "
                "does not have; pip install 'pcg[graders]'"
            )

    async def score(self, sample: Sample, host: GradingHost) -> Grade:
        return Grade(self, await host.beside(self._similarity, sample))

    def _similarity(self, sample: Sample) -> float:
        texts = self.input.fill(sample), self.reference.fill(sample)
        longest = max(map(len, texts))
        if longest > MOST_COMPARED:
            message = f"a text of {longest} characters; at most {MOST_COMPARED} are compared"
            raise GradingError(message, "other_error")
        return METRICS[self.evaluation_metric](*texts)


class PythonGrader(Grader, tag="python", frozen=True, kw_only=True):
    """A source that defines `grade(sample, item)`, which returns a number."""

    source: str
    image_tag: Any = None

    def __post_init__(self) -> None:
        if self.image_tag is not None:
            raise ValueError(
                "image_tag is not supported: graders run with this server's Python; leave it out"
            )
        if len(self.source) > MOST_TEXT:
            raise ValueError(f"source has {len(self.source)} characters; use at most {MOST_TEXT}")
        if "\0" in self.source or any("\ud800" <= letter <= "\udfff" for letter in self.source):
            raise ValueError("source has characters that no source has")

    async def score(self, sample: Sample, host: GradingHost) -> Grade:
        return Grade(self, await host.run(self.source, sample))


def require_word(name: str, value: str, words: Any) -> None:
    """Raise a ValueError for a value of a field that is not among the words."""
    if value not in words:
        raise ValueError(f"{name}={value[:64]!r}; use {', '.join(words)}")


# ----------------------------------------------------------------------------------------- metrics


def _fuzzy_match(text: str, reference: str) -> float:
    from rapidfuzz.fuzz import ratio

    return ratio(text, reference) / 100


def _bleu(text: str, reference: str) -> float:
    from sacrebleu import sentence_bleu

    return min(1.0, float(sentence_bleu(text, [reference]).score) / 100)


def _gleu(text: str, reference: str) -> float:
    from nltk.translate.gleu_score import sentence_gleu

    return float(sentence_gleu([reference.split()], text.split()))


class _NoSynonyms:
    """A word net without synonyms, so that METEOR matches only words and stems."""

    def synsets(self, word: str) -> list[Any]:
        return []


def _meteor(text: str, reference: str) -> float:
    from nltk.stem.porter import PorterStemmer
    from nltk.translate.meteor_score import single_meteor_score

    class Stemmer(PorterStemmer):  # type: ignore[misc]
        def stem(self, word: str, to_lowercase: bool = True) -> str:
            return word if len(word) > _LONGEST_STEMMED else str(super().stem(word, to_lowercase))

    stemmer = Stemmer(mode=PorterStemmer.ORIGINAL_ALGORITHM)
    words = reference.split(), text.split()
    return float(single_meteor_score(*words, stemmer=stemmer, wordnet=_NoSynonyms()))


def _rouge_n(n: int) -> Callable[[str, str], float]:
    def rouge(text: str, reference: str) -> float:
        from rouge_score.rouge_scorer import RougeScorer

        return float(RougeScorer([f"rouge{n}"]).score(reference, text)[f"rouge{n}"].fmeasure)

    return rouge


def _rouge_l(text: str, reference: str) -> float:
    # rouge-score's table of the longest common subsequence takes 20 s for the longest texts.
    from rapidfuzz.distance import LCSseq
    from rouge_score.tokenize import tokenize

    words, others = tokenize(text, None), tokenize(reference, None)
    common = LCSseq.similarity(words, others)
    return 2 * common / (len(words) + len(others)) if common else 0.0


METRICS: dict[str, Callable[[str, str], float]] = {
    "fuzzy_match": _fuzzy_match,
    "bleu": _bleu,
    "gleu": _gleu,
    "meteor": _meteor,
    **{f"rouge_{n}": _rouge_n(n) for n in range(1, 6)},
    "rouge_l": _rouge_l,
}
"""The metrics of a text and its reference, each from 0 to 1."""
