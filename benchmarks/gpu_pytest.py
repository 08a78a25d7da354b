"""The tests that are marked `gpu`, one row for each test function."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from gpu_case import Bench, Case, Row, Setting

ROOT = Path(__file__).parents[1]
MOST: int | None = None
"""Limit of the functions that run; None for none."""
# A warning of a version that no test has seen is no failure.
_OPTIONS = ("-q", "-m", "gpu", "-p", "no:cacheprovider", "-W", "default", f"--rootdir={ROOT}")


class _Notes:
    """Plugin that keeps the ids of tests, and their outcomes with the messages of failures."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.outcomes: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}

    def pytest_collection_finish(self, session: Any) -> None:
        self.ids = [item.nodeid for item in session.items]

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or not report.passed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.outcomes[report.outcome].append(
                report.nodeid if crash is None else f"{report.nodeid}: {crash.message}"
            )


def pytest_settings(bench: Bench) -> Iterator[Setting]:
    """Collect the functions of the files that have such tests."""
    import pytest

    files = [path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text()]
    notes = _Notes()
    paths = [str(path) for path in sorted(files)]
    status = pytest.main(["--collect-only", *_OPTIONS, *paths], plugins=[notes])
    if status:
        raise RuntimeError(f"pytest collects with status {int(status)}")
    functions: dict[str, list[str]] = {}
    for id_ in notes.ids:
        functions.setdefault(id_.partition("[")[0], []).append(id_)
    for name, ids in [*functions.items()][:MOST]:
        yield name, partial(_run, ids)


def _run(ids: list[str]) -> Row:
    import pytest

    notes = _Notes()
    pytest.main([*_OPTIONS, *(str(ROOT / id_) for id_ in ids)], plugins=[notes])
    passed, failed, skipped = notes.outcomes.values()
    if failed:
        raise AssertionError(f"{len(failed)} of {len(ids)} failed: {'; '.join(failed)}")
    return Row(note=f"{len(passed)} passed, {len(skipped)} skipped")


CASE = Case("pytest", 150, pytest_settings, alone=True)
