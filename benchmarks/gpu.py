"""The GPU benchmark: what is right, then kernels and whole steps against rooflines and peers.

    python benchmarks/gpu.py --part 1 [--quick] [--only NAME …] [--output FILE]
    python benchmarks/gpu.py --part 2

Part 1 checks kernels, programs and engines with each ptxas that there is, then measures decode
steps, prompts and adapters' products; part 2 finetuning, serving and the other kernels. Each takes
eight minutes at most; without `--part` both run. Nothing has to be installed but torch, triton,
transformers, peft and rich; pcg is the folder that this file lies in.

The ceilings, a large copy and a large product in bf16, come first. Then each case runs in a process
of its own, and is ended when its time is over: what it has measured until then counts, and a row
says what is missing. The file is written after each row, with those of an earlier part on the same
device. The tables show, for each setting, our time, the peers' in the same run, and the time that
bytes and FLOPs take at the ceilings (`gpu_work.py`); then the goals, each passed or missed.

Needs one NVIDIA GPU; whole steps need 80 GB, of an 8B model and its activations. Results:
results/gpu.json. The status is 1 if something could not be measured; goals do not change it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any

import gpu_correctness
import gpu_work as work
from gpu_case import Bench, Case, CudaTimer, Row, Timer, measured
from gpu_decode import CASES as DECODE
from gpu_groups import CASES as GROUPS
from gpu_kernels import CASES as KERNELS
from gpu_lora import CASES as LORA
from gpu_model import CASES as MODELS
from gpu_training import CASES as TRAINING
from measure import RESULTS, environment
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
LIMIT_S = 465.0
"""Time of a part, from the first import to the file: 15 seconds less than eight minutes."""
START_S = 15.0
"""Time that must be left to begin a case: a process needs that long for torch and the device."""
CHECKS = Case("correctness", sum(gpu_correctness.SECONDS), gpu_correctness.settings)
PARTS: Mapping[int, tuple[Case, ...]] = {
    1: (CHECKS, *DECODE, *LORA),
    2: (*MODELS, *KERNELS, *TRAINING, *GROUPS),
}
CASES: tuple[Case, ...] = tuple(case for part in PARTS.values() for case in part)
_MARK = "gpu-row "
"""The beginning of a row among the lines of a case's process."""
GOALS = (
    ("decode", "batch 32, 0 adapters"),
    ("decode", "batch 32, 32 adapters"),
    ("decode", "prefill, 8 of 1024 tokens, 8 adapters"),
    ("lora", "distinct, batch 64"),
    ("finetune", "against eager"),
    ("finetune", "against checkpointing"),
)
"""Cases and settings whose rows have a goal; what is right is one, too."""


def ceilings(timer: Timer) -> work.Ceilings:
    """Measure what the device does at its best."""
    import torch

    count, n, size = 2**29, 8192, 2
    x, a, b = (
        torch.randn(shape, dtype=torch.bfloat16, device="cuda")
        for shape in ((count,), (n, n), (n, n))
    )
    y = torch.empty_like(x)
    for _ in range(200):  # until clocks are up
        torch.mm(a, b)
    copy_us = timer.median_us(lambda: y.copy_(x))
    product_us = timer.median_us(lambda: torch.mm(a, b))
    return work.Ceilings(
        work.copy_work(count, size).bytes / copy_us * 1e6,
        work.product_work(n, n, n, size).flops / product_us * 1e6,
    )


# ------------------------------------------------------------------------------------- processes


def rows_of(
    command: Sequence[str], case: str, seconds: float, variables: Mapping[str, str] | None = None
) -> Iterator[Row]:
    """The rows that a process prints; it is ended after so many seconds.

    Args:
        variables: of its environment, beside those that are there.
    """
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, **(variables or {})},
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
                    found = Row.from_json(json.loads(line.removeprefix(_MARK)))
                    yield replace(found, case=case)
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


def command_of(name: str, found: work.Ceilings, seconds: float, quick: bool) -> list[str]:
    """The command that runs a case in a process."""
    numbers = [str(found.bytes_per_s), str(found.flops_per_s), str(seconds)]
    return [sys.executable, __file__, "--case", name, *numbers, *["--quick"] * quick]


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


def goals(rows: Sequence[Row]) -> list[tuple[str, str, bool | None]]:
    """Each goal, what was reached, and whether that passes; None where it was not measured."""
    found: list[tuple[str, str, bool | None]] = []
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        if row.case.startswith(CHECKS.name):
            by_name.setdefault(row.case, []).append(row)
    for name, checks in by_name.items() or [(CHECKS.name, [])]:
        wrong = [row.setting for row in checks if row.failed]
        said = f"{len(checks) - len(wrong)} of {len(checks)} checks"
        found.append(
            (name, ", ".join([said, *wrong]), not wrong if checks else None),
        )
    known = {(row.case, row.setting): row for row in rows}
    for case, setting in GOALS:
        row = known.get((case, setting))
        if row is None or row.reached is None:
            why = "" if row is None else row.note
            found.append((f"{case}, {setting}", why, None))
        else:
            found.append((f"{case}, {setting}: {row.target}", f"{row.reached:.2f}", row.met))
    return found


def goal_table(rows: Sequence[Row]) -> Table:
    """The table of goals."""
    made = Table(title="goals")
    made.add_column("goal")
    made.add_column("reached", overflow="fold")
    made.add_column("")
    for name, reached, is_met in goals(rows):
        words = {True: "pass", False: "MISS", None: "not measured"}[is_met]
        made.add_row(name, reached, words, style=None if is_met else "red")
    return made


def result(rows: Sequence[Row], found: work.Ceilings, seconds: float) -> dict[str, Any]:
    """The JSON object of the results."""
    return {
        "ceilings": {"bytes_per_s": found.bytes_per_s, "flops_per_s": found.flops_per_s},
        "goals": [
            {"goal": name, "reached": reached, "passes": is_met}
            for name, reached, is_met in goals(rows)
        ],
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


@dataclass
class Results:
    """The rows so far, in a file that is whole at any time.

    Attributes:
        rows: those of this run, behind those of an earlier part on the same device and versions.
    """

    output: Path
    ceilings: work.Ceilings
    began: float
    rows: list[Row] = field(default_factory=list)

    @classmethod
    def of(
        cls, output: Path, ceilings: work.Ceilings, began: float, cases: Sequence[Case]
    ) -> Results:
        names = [case.name for case in cases]
        before: list[Row] = []
        if output.is_file():
            there = json.loads(output.read_text())
            if all(there["environment"].get(key) == value for key, value in _device().items()):
                rows = [Row.from_json(one) for one in there["rows"]]
                before = [row for row in rows if row.case.partition(",")[0] not in names]
        output.parent.mkdir(parents=True, exist_ok=True)
        return cls(output, ceilings, began, before)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        print(f"  {row.case}, {row.setting}: {_time(row.ours_us) or row.note}", file=sys.stderr)
        found = result(self.rows, self.ceilings, monotonic() - self.began)
        new = self.output.with_suffix(".new")
        new.write_text(json.dumps(found, indent=2) + "\n")
        new.replace(self.output)


# ------------------------------------------------------------------------------------------ main


def run_cases(results: Results, cases: Sequence[Case], quick: bool, until: float) -> None:
    """Run cases one after the other; what is timed uses the first ptxas that is right."""
    variables: dict[str, str] = {}
    for case in cases:
        if case is not CHECKS:
            _run(results, replace(case, environment=variables), case.name, quick, until)
            continue
        right: list[Case] = []
        for check in gpu_correctness.cases():
            start = len(results.rows)
            _run(results, check, case.name, quick, until)
            if not any(row.failed for row in results.rows[start:]):
                right.append(check)
        variables = dict(right[0].environment) if right else {}


def _run(results: Results, case: Case, name: str, quick: bool, until: float) -> None:
    left = until - monotonic()
    if left < START_S:
        results.add(Row.failure(case.name, "all", f"only {left:.0f} s were left"))
        return
    seconds = min(case.seconds, left)
    command = command_of(name, results.ceilings, seconds, quick)
    for row in rows_of(command, case.name, seconds, case.environment):
        results.add(row)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; see the module."""
    began = monotonic()
    sys.path.append(str(ROOT))  # pcg need not be installed
    names = [case.name for case in CASES]
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", type=int, choices=list(PARTS), help="both by default")
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
    parts = list(PARTS) if given.part is None else [given.part]
    wanted = [case for part in parts for case in PARTS[part]]
    wanted = [case for case in wanted if not given.only or case.name in given.only]
    results = Results.of(given.output, found, began, wanted)
    run_cases(results, wanted, given.quick, began + LIMIT_S * len(parts))
    console = Console()
    console.print(table(results.rows, found))
    console.print(goal_table(results.rows))
    return int(any(row.failed for row in results.rows))


if __name__ == "__main__":
    sys.exit(main())
