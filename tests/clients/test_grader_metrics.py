"""Metrics of graders against those of the packages that they follow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pcg.graders.text_similarity import METRICS
from tests.support.other_clients import ROOT, client_program, run_client

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_metrics_are_those_of_other_packages(tmp_path: Path) -> None:
    python = client_program("grader-metrics", "python")
    script = ROOT / "tests" / "clients" / "grader_metrics.py"
    printed = run_client([python, str(script)], tmp_path, PCG_PAIRS="1000", PCG_SEED="7")
    rows = json.loads(printed.splitlines()[-1])
    assert len(rows) > 1000
    for row in rows:
        for name, metric in METRICS.items():
            assert metric(row["text"], row["reference"]) == pytest.approx(row[name], abs=1e-9), row
