"""The grader `text_similarity`: how alike two texts are, by one of the field's metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from pcg.errors import GraderError, GradingError
from pcg.graders.fields import Fields
from pcg.graders.grader import Grader, Score
from pcg.graders.host import GradingHost
from pcg.graders.sample import Sample
from pcg.graders.similarity.bleu import bleu
from pcg.graders.similarity.gleu import gleu
from pcg.graders.similarity.meteor import meteor
from pcg.graders.similarity.rouge import rouge_l, rouge_n
from pcg.graders.similarity.subsequence import fuzzy_match
from pcg.graders.template import Template

MOST_COMPARED = 2**15
"""The most characters of a text that is compared: the work grows with the product of both."""

METRICS: dict[str, Callable[[str, str], float]] = {
    "fuzzy_match": fuzzy_match,
    "bleu": bleu,
    "gleu": gleu,
    "meteor": meteor,
    **{f"rouge_{n}": partial(rouge_n, n=n) for n in range(1, 6)},
    "rouge_l": rouge_l,
}
"""The metrics, each of a text and its reference."""


@dataclass(frozen=True)
class TextSimilarity(Grader):
    """The similarity of two texts, from 0 to 1."""

    type: ClassVar[str] = "text_similarity"
    fields: ClassVar[tuple[str, ...]] = (
        "type",
        "name",
        "input",
        "reference",
        "evaluation_metric",
    )

    name: str
    input: Template
    reference: Template
    metric: str

    @classmethod
    def read(cls, given: Fields) -> TextSimilarity:
        """Return the grader of some fields. GraderError: it cannot be."""
        metric = given.one_of("evaluation_metric", (*METRICS, "cosine"))
        if metric == "cosine":
            raise GraderError(
                f"{given.where}.evaluation_metric='cosine' needs embeddings, which graders do not "
                f"have; use {', '.join(METRICS)}"
            )
        return cls(given.name(), given.template("input"), given.template("reference"), metric)

    async def score(self, sample: Sample, host: GradingHost) -> Score:
        return Score(await host.beside(self._similarity, sample))

    def _similarity(self, sample: Sample) -> float:
        texts = self.input.fill(sample), self.reference.fill(sample)
        longest = max(map(len, texts))
        if longest > MOST_COMPARED:
            raise GradingError(
                f"a text of {longest} characters; at most {MOST_COMPARED} are compared",
                "other_error",
            )
        return METRICS[self.metric](*texts)
