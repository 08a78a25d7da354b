"""Freed memory goes back to the system: a step's resident memory is what its plan says."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pcg.kernels.torch.products import Product, ProductRequest
from pcg.runtime.memory import host_memory
from pcg.runtime.memory.host_memory import FreedMemory, is_set_by

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "bench_peak.py"
HOLES = 1600


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
    # And with the model, the optimizer's states and the packed copies, which explain counts.
    assert found["process_mib"] == pytest.approx(found["explained_mib"], rel=0.15)


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


@pytest.mark.skipif(host_memory._glibc() is None, reason="glibc 2.33 or newer")
@pytest.mark.parametrize("slack", [host_memory.SLACK, 1.0])
def test_holes_go_back_once_they_are_too_much(slack: float) -> None:
    """Those between blocks that stay are too small for what comes next; none is a mapping."""
    freed = FreedMemory(slack)
    blocks = [torch.ones(2**16, dtype=torch.uint8) for _ in range(HOLES)]
    freed.look()
    full = host_memory._anonymous_bytes()
    del blocks[::2]
    larger = [torch.ones(100_000, dtype=torch.uint8) for _ in range(HOLES // 4)]
    before = host_memory._anonymous_bytes()
    freed.look()
    after = host_memory._anonymous_bytes()
    assert before > full + 20 * 2**20
    assert (after < full + 10 * 2**20) == (slack < 1.0)
    del blocks, larger


def test_a_function_that_is_looked_at_requests_and_returns_the_same() -> None:
    requested: list[Product] = [object(), object()]  # type: ignore[list-item]

    def function() -> ProductRequest[str]:
        yield from requested
        return "done"

    def outcome(requests: ProductRequest[str]) -> ProductRequest[None]:
        results.append((yield from requests))

    results: list[str] = []
    assert list(outcome(FreedMemory().between(function()))) == requested
    assert results == ["done"]
