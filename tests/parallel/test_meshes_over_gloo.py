"""Meshes of four processes over gloo train what one process trains: families and methods."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.meshes import CASES, check_close, train_case
from tests.support.started_ranks import SCRIPT, start


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("sizes", ["dp2-tp2", "cp2-tp2"])
def test_families_and_methods(sizes: str, tmp_path: Path) -> None:
    words = ["launch", "train_over_mesh", f"output={tmp_path}", f"sizes={sizes}", "ranks=4"]
    started = start(SCRIPT, *words)
    expected = {case: train_case(*case) for case in CASES}
    _, errors = started.communicate(timeout=1000)
    assert started.returncode == 0, errors
    for case, one in expected.items():
        for rank in range(4):
            check_close(torch.load(tmp_path / f"{'-'.join(case)}-{rank}.pt"), one)
