"""`pcg runs`: lists records, compares them, and says nothing that a terminal would obey."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pcg.records.record import RunRecord
from tests.support.command_line import assert_one_error, output_of, run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, rate in (("a", 1e-3), ("b", 2e-3)):
        with RunRecord(tmp_path / name / "record", {"learning_rate": rate}, kind="sft") as record:
            record.log(1, loss=2.0, eval_loss=1.5, tokens_per_second=100.0)
            record.log(2, loss=1.0, eval_loss=1.75, tokens_per_second=1250.0)
    RunRecord(tmp_path / "killed", name="\x1b[2J", kind="\x1b[31m")._metrics.close()
    return tmp_path


def test_runs_are_listed(folder: Path) -> None:
    text = output_of("runs", folder)
    assert text == output_of("runs", "list", folder)
    first = text.splitlines()[1].split()
    assert first[:8] == ["a/record", "sft", "completed", "2", "1.0000", "1.7500", "1.5000", "1,250"]
    assert "\x1b" not in text
    assert "stopped" in text.splitlines()[3]
    found = json.loads(output_of("runs", folder, "--json"))["runs"]
    assert [one["status"] for one in found] == ["completed", "completed", "stopped"]
    assert found[0]["best_eval_loss"] == 1.5
    assert found[0]["best_step"] == 1
    (folder / "a/record/run.json").write_text("{")
    damaged = run("runs", folder)
    assert damaged.exit_code == 0
    assert "run.json is damaged" in damaged.stderr
    assert "b/record" in damaged.stdout


def test_runs_are_compared(folder: Path) -> None:
    page = folder / "page.html"
    text = output_of("runs", "compare", folder / "a", folder / "b/record", "--html", page)
    cells = {line.split("  ")[0]: line.split()[-2:] for line in text.splitlines()[1:-1]}
    assert cells["learning_rate"] == ["0.001", "0.002"]
    assert cells["eval_loss, best"] == ["1.5", "1.5"]
    assert cells["tokens/s"] == ["1250", "1250"]
    assert "svg" in page.read_text("utf-8")
    found = json.loads(output_of("runs", "compare", folder / "a", folder / "b", "--json"))
    assert [one["run"] for one in found["runs"]] == ["a", "b"]
    assert [one["options"] for one in found["runs"]] == [
        {"learning_rate": 1e-3}, {"learning_rate": 2e-3},
    ]  # fmt: skip


def test_many_runs_keep_all_of_their_columns(folder: Path) -> None:
    text = output_of("runs", "compare", *[folder / name for name in "abababababab"])
    assert "…" not in text
    assert text.splitlines()[0].count("(") == 12


def test_a_page_is_written_for_a_run_that_was_killed(folder: Path) -> None:
    assert output_of("runs", "report", folder / "killed").strip() == str(
        folder / "killed/report.html"
    )
    assert "stopped" in (folder / "killed/report.html").read_text("utf-8")


def test_what_is_no_run_is_refused(folder: Path) -> None:
    assert_one_error(run("runs", folder / "nothing"), "is no folder")
    assert_one_error(run("runs", "compare", folder), "has no record of a run")
    assert output_of("runs", folder / "a/record/") != ""
