"""Metrics of similarity: the values of rapidfuzz, sacrebleu, nltk and rouge-score.

The file was written with rapidfuzz 3.14.6, sacrebleu 2.6.0, nltk 3.10.4 and rouge-score 0.1.2.
"""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path

import pytest

from pcg.errors import GraderError
from pcg.graders.reader import grader_from
from pcg.graders.text_graders import METRICS, MOST_COMPARED

ROWS = [
    json.loads(line)
    for line in (Path(__file__).parent / "other_peoples_metrics.jsonl").read_text().splitlines()
]


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_has_the_value_of_its_package(name: str) -> None:
    assert len(ROWS) == 32
    for row in ROWS:
        value = METRICS[name](row["text"], row["reference"])
        assert value == pytest.approx(row[name], abs=1e-9), row
        assert 0 <= value <= 1


@pytest.mark.parametrize("name", METRICS)
def test_the_longest_texts_take_no_time(name: str) -> None:
    text, reference = ("ab cd ef y" * 2**12)[:MOST_COMPARED], "ba dc y" * (MOST_COMPARED // 7)
    METRICS[name]("a", "b")  # imports
    began = time.perf_counter()
    assert 0 <= METRICS[name](text, reference) <= 1
    assert 0 <= METRICS[name]("y" * MOST_COMPARED, "yt" * (MOST_COMPARED // 2)) <= 1
    assert time.perf_counter() - began < 5


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    alike = {"type": "text_similarity", "name": "a", "input": "a", "reference": "b"}
    with pytest.raises(GraderError, match=r"pip install 'pcg\[graders\]'"):
        grader_from({**alike, "evaluation_metric": "bleu"})
