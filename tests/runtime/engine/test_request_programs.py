"""Random programs of requests, beside jobs and changes, against transformers and peft alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.families import BY_NAME, FAMILIES
from tests.support.request_programs import RequestProgram, Served

FEW = ("gemma2",)
"""Families of the default run; the others, and more programs, run in the slow one."""
CASES = [
    pytest.param(family.name, marks=() if family.name in FEW else pytest.mark.slow)
    for family in FAMILIES
]


@pytest.mark.parametrize("name", CASES)
def test_a_program_of_each_family(name: str, tmp_path: Path) -> None:
    served = Served.of(BY_NAME[name], tmp_path)
    checked = []
    for seed in range(2):
        program = RequestProgram(served, seed)
        program.run()
        checked += program.checked
    assert len(checked) >= 20
