"""Freed memory goes back to the system: a step's resident memory is what its plan says."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pcg.runtime.memory import host_memory
from pcg.runtime.memory.host_memory import (
    CAPACITIES,
    KEPT_PRODUCTS,
    FreedMemory,
    bound_shape_caches,
    is_set_by,
)

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "bench_peak.py"
HOLES = 1600


@pytest.mark.slow
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


# --------------------------------------------------------------------------------- caches of shapes

_GROWTH = """
import ctypes, torch
from transformers import AutoModelForCausalLM, LlamaConfig
import pcg

torch.set_num_threads(1)
libc = ctypes.CDLL(None)

def resident_kib():
    libc.malloc_trim(0)
    with open("/proc/self/statm") as statm:
        fields = statm.read().split()
    return (int(fields[1]) - int(fields[2])) * 4

config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=1,
                     num_attention_heads=2, num_key_value_heads=2, vocab_size=64)
executor = pcg.compile(AutoModelForCausalLM.from_config(config).eval())
executor.logits([1] * 320)
for length in range(1, 60):
    executor.logits([1] * length)
before = resident_kib()
for length in range(60, 160):
    executor.logits([1] * length)
print((resident_kib() - before) / 100)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's resident pages")
def test_new_lengths_keep_no_memory() -> None:
    """In a process of its own: torch's and oneDNN's caches take their bounds once."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _GROWTH], capture_output=True, text=True, check=True
    )
    assert float(run.stdout.split()[-1]) < 100  # KiB a length


def test_bounds_of_the_environment_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setenv(CAPACITIES[0], "7")
    monkeypatch.delenv(CAPACITIES[1], raising=False)
    bound_shape_caches()
    assert os.environ[CAPACITIES[0]] == "7"
    assert os.environ[CAPACITIES[1]] == str(KEPT_PRODUCTS)
