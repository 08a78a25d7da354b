"""The GPU benchmark: kernels and whole steps against rooflines and peers, in nine minutes at most.

    python benchmarks/gpu.py [--quick] [--only NAME …] [--output FILE]

The ceilings, a large copy and a large product in bf16, come first. Then each case runs in a process
of its own, and is ended when its time is over: what it has measured until then counts, and a row
says what is missing. The table shows, for each setting, our time, the peers' in the same run, the
time that bytes and FLOPs take at the ceilings (`gpu_work.py`), and the targets.

Needs one NVIDIA GPU; whole steps need 80 GB, of an 8B model and its activations. Results:
results/gpu.json. The status is 1 if something could not be measured; targets do not change it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import gpu_work as work
from gpu_case import Bench, Case, CudaTimer, Row, Timer, measured
from gpu_groups import CASES as GROUPS
from gpu_kernels import CASES as KERNELS
from gpu_model import CASES as MODELS
from gpu_training import CASES as TRAINING
from measure import RESULTS, environment
from rich.console import Console
from rich.table import Table

LIMIT_S = 530.0
"""Time of the whole, from the first import to the file: ten seconds less than nine minutes."""
START_S = 15.0
"""Time that must be left to begin a case: a process needs that long for torch and the device."""
CASES: tuple[Case, ...] = (*KERNELS, *TRAINING, *GROUPS, *MODELS)
_MARK = "gpu-row "
"""The beginning of a row among the lines of a case's process."""


def ceilings(timer: Timer) -> work.Ceilings:
    """Measure what the device does at its best."""
    import torch

    count, n, size = 2**29, 8192, 2
    x, a, b = (
        torch.randn(shape, dtype=torch.bfloat16, device="cuda")
        for shape in ((count,), (n, n), (n, n))
    )
    y = torch.empty_like(x)
    copy_us = timer.median_us(lambda: y.copy_(x))
    product_us = timer.median_us(lambda: torch.mm(a, b))
    return work.Ceilings(
        work.copy_work(count, size).bytes / copy_us * 1e6,
        work.product_work(n, n, n, size).flops / product_us * 1e6,
    )


# ------------------------------------------------------------------------------------- processes


def rows_of(command: Sequence[str], case: str, seconds: float) -> Iterator[Row]:
    """The rows that a process prints; it is ended after so many seconds."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    )  # a session, so that what it has started ends with it
    late = threading.Event()

    def end() -> None:
        late.set()
        os.killpg(process.pid, signal.SIGKILL)

    clock = threading.Timer(seconds, end)
    clock.start()
    with process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(_MARK):
                    yield Row.from_json(json.loads(line.removeprefix(_MARK)))
                else:
                    print(line, end="", file=sys.stderr)
            status = process.wait()
        finally:
            clock.cancel()
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if late.is_set():
        yield Row.failure(case, "the rest", f"ended after {seconds:.0f} s")
    elif status:
        yield Row.failure(case, "the rest", f"its process ended with status {status}")


def command_of(case: Case, found: work.Ceilings, seconds: float, quick: bool) -> list[str]:
    """The command that runs a case in a process."""
    numbers = [str(found.bytes_per_s), str(found.flops_per_s), str(seconds)]
    return [sys.executable, __file__, "--case", case.name, *numbers, *["--quick"] * quick]


def run_case(case: Case, bench: Bench) -> None:
    """In its process: print a case's rows as they come."""
    for row in measured(bench, case):
        print(f"{_MARK}{json.dumps(row.to_json())}", flush=True)


# ---------------------------------------------------------------------------------------- report


def table(rows: Sequence[Row], found: work.Ceilings) -> Table:
    """The table of what was measured."""
    made = Table(
        title=f"copy {found.bytes_per_s / 1e9:,.0f} GB/s, "
        f"bf16 products {found.flops_per_s / 1e12:,.0f} TFLOP/s"
    )
    made.add_column("case")
    made.add_column("setting")
    for name in ("ours", "floor", "of ceiling"):
        made.add_column(name, justify="right")
    made.add_column("peers")
    made.add_column("target")
    made.add_column("note", overflow="fold")
    for row in rows:
        made.add_row(
            row.case,
            row.setting,
            "failed" if row.failed else _cost(row.ours_us, row.ours_bytes),
            _time(row.floor_us),
            "" if row.share is None else f"{row.share:.0%}",
            "\n".join(
                f"{name} {_cost(us, row.peers_bytes.get(name))}"
                for name, us in row.peers_us.items()
            ),
            _target(row),
            row.note,
            style="red" if row.failed or row.met is False else None,
        )
    return made


def _time(us: float | None) -> str:
    if us is None:
        return ""
    return f"{us:,.1f} µs" if us < 1e4 else f"{us / 1e3:,.1f} ms"


def _cost(us: float | None, size_bytes: int | None) -> str:
    return _time(us) + (f", {size_bytes / 2**30:.1f} GiB" if size_bytes else "")


def _target(row: Row) -> str:
    if not row.target:
        return ""
    if row.reached is None:
        return f"{row.target}: not measured"
    return f"{row.target}: {row.reached:.2f}, {'met' if row.met else 'missed'}"


def result(rows: Sequence[Row], found: work.Ceilings, seconds: float) -> dict[str, Any]:
    """The JSON object of the results."""
    return {
        "ceilings": {"bytes_per_s": found.bytes_per_s, "flops_per_s": found.flops_per_s},
        "rows": [row.to_json() for row in rows],
        "seconds": round(seconds, 1),
        "environment": {**environment(), **_device()},
    }


def _device() -> dict[str, Any]:
    import torch
    import triton

    found: dict[str, Any] = {"triton": triton.__version__, "cuda": torch.version.cuda}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "gpu_bytes": properties.total_memory}
    return found


# ------------------------------------------------------------------------------------------ main


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; see the module."""
    began = monotonic()
    names = [case.name for case in CASES]
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="few settings of each case")
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--output", type=Path, default=RESULTS / "gpu.json")
    parser.add_argument("--case", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    import torch

    if not torch.cuda.is_available():
        print("error: benchmarks/gpu.py needs an NVIDIA GPU, and torch sees none", file=sys.stderr)
        return 1
    timer = CudaTimer(seconds=0.05 if given.quick else 0.15, most=20 if given.quick else 100)
    if given.case:
        name, *numbers = given.case
        bytes_per_s, flops_per_s, seconds = map(float, numbers)
        (case,) = (case for case in CASES if case.name == name)
        known = work.Ceilings(bytes_per_s, flops_per_s)
        run_case(case, Bench(timer, known, given.quick, until=began + 0.9 * seconds))
        return 0
    found = ceilings(timer)
    del timer  # its memory
    torch.cuda.empty_cache()
    rows: list[Row] = []
    for case in CASES:
        if given.only and case.name not in given.only:
            continue
        left = began + LIMIT_S - monotonic()
        if left < START_S:
            rows.append(Row.failure(case.name, "all", f"only {left:.0f} s were left"))
            continue
        seconds = min(case.seconds, left)
        for row in rows_of(command_of(case, found, seconds, given.quick), case.name, seconds):
            rows.append(row)
            print(f"  {row.case}, {row.setting}: {_time(row.ours_us) or row.note}", file=sys.stderr)
    Console().print(table(rows, found))
    given.output.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result(rows, found, monotonic() - began), indent=2)
    given.output.write_text(text + "\n")
    return int(any(row.failed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
