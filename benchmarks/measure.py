"""Shared code of the benchmarks: interleaved rounds, ratios, the machine, and result files.

The machine is shared and noisy, so no time stands alone: every contender runs once a round, in
turn, and results are medians over the rounds of ratios within a round.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def interleave(
    contenders: Mapping[str, Callable[[], float]], rounds: int
) -> dict[str, list[float]]:
    """Run each contender once a round; return their values by name.

    Args:
        contenders: calls by name that run the workload and return its time in seconds or its rate.
        rounds: the number of rounds; one more comes first and is thrown away.
    Raises:
        SystemExit: fewer than one round.
    """
    if rounds < 1:
        raise SystemExit(f"error: {rounds} rounds; use at least 1")
    values: dict[str, list[float]] = {name: [] for name in contenders}
    for round_ in range(rounds + 1):
        for name, run in contenders.items():
            value = run()
            if round_:
                values[name].append(value)
                print(f"  round {round_} {name:<28} {value:10.3f}", file=sys.stderr)
    return values


def seconds(act: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def ratio(values: Mapping[str, list[float]], name: str, to: str) -> float:
    """Return the median over the rounds of one contender's value divided by another's."""
    pairs = zip(values[name], values[to], strict=True)
    return round(statistics.median(a / b for a, b in pairs), 3)


def medians(values: Mapping[str, list[float]]) -> dict[str, float]:
    """Return each contender's median over the rounds."""
    return {name: round(statistics.median(series), 4) for name, series in values.items()}


def environment() -> dict[str, Any]:
    """Return the machine and the versions."""
    packages = ("torch", "transformers", "peft", "safetensors")
    return {
        "machine": f"{_processor()}, {os.cpu_count()} cores, one thread used",
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
        "command": " ".join(["python", *sys.argv]),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if "model name" in line), "unknown")


def write(name: str, result: Mapping[str, Any]) -> None:
    """Write `results/<name>.json` and print it."""
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps({**result, "environment": environment()}, indent=2)
    (RESULTS / f"{name}.json").write_text(text + "\n")
    print(text)
