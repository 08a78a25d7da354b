"""The device, its assemblers and `pytest -m gpu`: the cases of the first hour without kernels.

Each assembler (ptxas) runs the self-test of `pcg/kernels/triton/ptxas.py` in a process of its own.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from gpu_bench import Bench, Case, Row, Setting
from harness import ROOT

PACKAGES = ("torch", "triton", "transformers", "peft", "safetensors", "msgspec")
COPIED, SQUARE = 2**29, 8192
"""Elements of the large copies, and the side of the large product."""
MOST_TESTS: int | None = None
"""Limit of the test functions that run; None for none."""

# ------------------------------------------------------------------------------------- the device


def device_settings(bench: Bench) -> Iterator[Setting]:
    """Names and versions, assemblers, and what the device does at its best."""
    yield "versions", versions
    yield "assemblers", assemblers
    yield "ceilings", partial(ceilings, bench)


def versions() -> Row:
    import torch

    properties = torch.cuda.get_device_properties(0)
    found: dict[str, Any] = {
        "gpu": properties.name,
        "gpu_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
        "driver": _driver(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }
    for package in PACKAGES:
        found[package] = metadata.version(package) if find_spec(package) else "none"
    return Row(note=", ".join(f"{key} {value}" for key, value in found.items()), details=found)


def _driver() -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "unknown"
    asked = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    said = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False).stdout
    return next(iter(said.splitlines()), "unknown")


def ceilings(bench: Bench) -> Row:
    """The rates of a large copy, of a large product in bf16, and of a copy from pinned memory."""
    import torch

    size = 2
    x, a, b = (
        torch.randn(shape, dtype=torch.bfloat16, device=bench.device)
        for shape in ((COPIED,), (SQUARE, SQUARE), (SQUARE, SQUARE))
    )
    y = torch.empty_like(x)
    pinned = torch.zeros(COPIED // 4, dtype=torch.bfloat16).pin_memory()
    for _ in range(SQUARE // 40):  # until clocks are up
        torch.mm(a, b)
    copy_us = bench.timer.median_us(lambda: y.copy_(x))
    product_us = bench.timer.median_us(lambda: torch.mm(a, b))
    host_us = bench.timer.median_us(lambda: y[: len(pinned)].copy_(pinned, non_blocking=True))
    found = {
        "bytes_per_s": 1e6 * 2 * size * COPIED / copy_us,
        "flops_per_s": 1e6 * 2 * SQUARE**3 / product_us,
        "host_bytes_per_s": 1e6 * pinned.nbytes / host_us,
    }
    note = (
        f"copies {found['bytes_per_s'] / 1e9:,.0f} GB/s, bf16 products "
        f"{found['flops_per_s'] / 1e12:,.0f} TFLOP/s, from the host "
        f"{found['host_bytes_per_s'] / 1e9:,.0f} GB/s"
    )
    return Row(note=note, details=found)


def assemblers() -> Row:
    """Versions of ptxas by their paths: the one that Triton takes, then newer ones."""
    import torch

    from pcg.kernels.triton import ptxas

    major, minor = torch.cuda.get_device_capability()
    there = ptxas.assemblers(10 * major + minor)
    found = {one.path: one.version for one in there}
    return Row(note=", ".join(map(str, there)), details=found)


def assembler_settings(bench: Bench) -> Iterator[Setting]:
    """A product whose bits are known, by the assembler of this process."""
    import torch

    from pcg.kernels.triton import ptxas

    major, minor = torch.cuda.get_device_capability()
    used = ptxas.used_ptxas(10 * major + minor)

    def check() -> Row:
        found, exact = ptxas.products(torch.device(bench.device))
        if not torch.equal(found.cpu(), exact):
            raise AssertionError("products whose operand lies in registers have wrong bits")
        return Row(target="its products have the right bits", reached=1.0, met=True)

    yield str(used), check


# ----------------------------------------------------------------------------------------- pytest

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
            why = "" if crash is None else f": {crash.message}"
            self.outcomes[report.outcome].append(report.nodeid + why)


def pytest_settings(bench: Bench) -> Iterator[Setting]:
    """Yield the functions of the files that have tests for a GPU."""
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
    for name, ids in [*functions.items()][:MOST_TESTS]:
        yield name, partial(_run_tests, ids)


def _run_tests(ids: list[str]) -> Row:
    import pytest

    notes = _Notes()
    pytest.main([*_OPTIONS, *(str(ROOT / id_) for id_ in ids)], plugins=[notes])
    passed, failed, skipped = notes.outcomes.values()
    if failed:
        raise AssertionError(f"{len(failed)} of {len(ids)} failed: {'; '.join(failed)}")
    return Row(note=f"{len(passed)} passed, {len(skipped)} skipped")


DEVICE = Case("device", 60, device_settings)
ASSEMBLER = Case("assembler", 60, assembler_settings)
PYTEST = Case("pytest", 150, pytest_settings)
