"""The allocator's thresholds: a step's resident memory is what its plan says."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from pcg.runtime.memory.host_allocator import is_set_by

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "bench_peak.py"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="thresholds of glibc's malloc")
def test_resident_memory_of_a_step_is_as_predicted() -> None:
    """In a fresh process, at a budget of 0: glibc's own thresholds take 2.2 times the prediction.

    The step is small, and code of libraries that it loads is up to a third of its 29 MiB.
    """
    command = [sys.executable, str(BENCHMARK), "--one", "pcg", "--budgets", "0"]
    command += ["--sizes", "2", "256", "4"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = json.loads(output)
    assert found["measured_mib"] == pytest.approx(found["predicted_mib"], rel=0.4)


@pytest.mark.parametrize(
    ("environment", "is_set"),
    [
        ({}, False),
        ({"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}, False),
        ({"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=4096"}, True),
        ({"MALLOC_TRIM_THRESHOLD_": "0"}, True),
    ],
)
def test_thresholds_of_the_environment_stay(environment: dict[str, str], is_set: bool) -> None:
    assert is_set_by(environment) == is_set
