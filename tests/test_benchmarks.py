"""The harness of the benchmarks: options of cases, targets of results, processes, the table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import harness
import run

SUBJECT = '''"""A subject."""
import harness as bench

@bench.case("fast", rounds=1)
def fast(rounds: int = 3, sizes: tuple[int, ...] = (1, 2), name: str = "x") -> dict:
    return {"rounds": rounds, "sizes": sizes, "name": name, "speed (at least 2)": 2.5}

if __name__ == "__main__":
    bench.main()
'''


def test_targets_are_the_bounds_of_keys_and_the_numbers_that_are_shown() -> None:
    result = {
        "speed (at least 2)": 3.0,
        "gaps, ms (at most 25)": {"nothing": 0.0, "text": 11.0},
        "cases": [{"jobs": 4, "tokens": 16, "error (at most 3 %)": 0.01, "rate": 7.0}],
        "other": 5,
    }
    assert [*harness.targets(result, ("16: rate",))] == [
        {"name": "speed", "value": 3.0, "at_least": 2.0},
        {"name": "gaps, ms: nothing", "value": 0.0, "at_most": 25.0},
        {"name": "gaps, ms: text", "value": 11.0, "at_most": 25.0},
        {"name": "cases: 4, 16: error", "value": 0.01, "at_most": 0.03},
        {"name": "cases: 4, 16: rate", "value": 7.0},
    ]


def test_rows_of_the_table() -> None:
    assert [*run.cells({"value": 2.0, "at_least": 1.0}, 1.0)] == ["≥ 1", "2", "+100.0%"]
    assert [*run.cells({"value": 2.0, "at_most": 1.0}, 2.0)] == ["≤ 1", "[red]2[/red]", ""]
    assert [*run.cells({"value": 2.0}, None)] == ["", "2", ""]


def test_committed_results_have_a_subject_that_measures_them() -> None:
    text = {name: (harness.ROOT / f"benchmarks/{name}.py").read_text() for name in run.subjects()}
    for file in harness.RESULTS.glob("*.json"):
        result = json.loads(file.read_text())
        if not file.stem.startswith("simulate-"):  # which `pcg simulate` writes
            assert f'"{file.stem}"' in text[result["subject"]]
            assert "environment" in result or "environment" in result["mixed"]


def test_ratios_are_medians_of_rounds() -> None:
    values = harness.interleave({"a": iter([9, 2, 6, 4]).__next__, "b": lambda: 2.0}, 3)
    assert values == {"a": [2, 6, 4], "b": [2.0] * 3}
    assert harness.ratio(values, "a", "b") == 2.0
    with pytest.raises(SystemExit, match="0 rounds; use at least 1"):
        harness.interleave({}, 0)


def test_options_of_a_case_are_its_parameters(tmp_path: Path) -> None:
    (tmp_path / "subject.py").write_text(SUBJECT)
    paths = os.pathsep.join([str(harness.ROOT / "benchmarks"), str(harness.ROOT)])
    given = {"capture_output": True, "text": True, "env": {**os.environ, "PYTHONPATH": paths}}
    command = [sys.executable, str(tmp_path / "subject.py"), "fast", "--quick"]
    ran = subprocess.run([*command, "--sizes", "3", "--name", "y"], check=True, **given)
    found = json.loads(ran.stdout)
    assert (found["rounds"], found["sizes"], found["name"]) == (1, [3], "y")
    assert found["targets"] == [{"name": "speed", "value": 2.5, "at_least": 2.0}]
    assert {"commit", "machine", "torch", "command"} <= {*found["environment"]}
    assert not (harness.RESULTS / "fast.json").exists()
