"""Meshes of processes over gloo train what one process trains: families and methods."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.meshes import CASES, check_close, train_case
from tests.support.started_ranks import SCRIPT, start

pytestmark = [pytest.mark.dist, pytest.mark.timeout(1200)]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", ["dp2-tp2", "cp2-tp2", "pp2-tp2"])
def test_families_and_methods(sizes: str, tmp_path: Path) -> None:
    check_mesh(sizes, 4, len(CASES), tmp_path)


def test_two_stages(tmp_path: Path) -> None:
    check_mesh("pp2", 2, 1, tmp_path)


def check_mesh(sizes: str, ranks: int, count: int, output: Path) -> None:
    """Compare the first `count` cases with one process's."""
    given = [f"output={output}", f"sizes={sizes}", f"ranks={ranks}", f"count={count}"]
    started = start(SCRIPT, "launch", "train_over_mesh", *given)
    expected = {case: train_case(*case) for case in CASES[:count]}
    _, errors = started.communicate(timeout=1000)
    assert started.returncode == 0, errors
    for case, one in expected.items():
        for rank in range(ranks):
            check_close(torch.load(output / f"{'-'.join(case)}-{rank}.pt"), one)
