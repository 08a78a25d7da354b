"""Metrics of similarity: those of rapidfuzz, sacrebleu, nltk and rouge-score.

The file has what tests/clients/grader_metrics.py printed with rapidfuzz 3.14.6, sacrebleu 2.6.0,
nltk 3.10.4 and rouge-score 0.1.2.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pcg.graders.similarity.meteor import stem
from pcg.graders.similarity.subsequence import longest_common
from pcg.graders.text_similarity import METRICS

ROWS = [
    json.loads(line)
    for line in (Path(__file__).parent / "other_peoples_metrics.jsonl").read_text().splitlines()
]


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_is_its_packages(name: str) -> None:
    assert len(ROWS) == 32
    for row in ROWS:
        found = METRICS[name](row["text"], row["reference"])
        assert found == pytest.approx(row[name], abs=1e-9), row
        assert 0 <= found <= 1


def test_stems_are_the_papers() -> None:
    found = [stem(word) for word in ("ponies", "relational", "hopping", "formaliti", "controll")]
    assert found == ["poni", "relat", "hop", "formal", "control"]


def test_the_longest_texts_take_no_time() -> None:
    assert longest_common("ab" * 2**14, "ba" * 2**14) == 2**15 - 1
