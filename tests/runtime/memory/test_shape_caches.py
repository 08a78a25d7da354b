"""Memory does not grow with the lengths that requests have had."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pcg.runtime.memory.host_memory import CAPACITIES, KEPT_PRODUCTS, bound_shape_caches

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
for length in range(1, 100):
    executor.logits([1] * length)
before = resident_kib()
for length in range(100, 300):
    executor.logits([1] * length)
print((resident_kib() - before) / 200)
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
