"""The first hour on a GPU: correctness first, then whole steps against predictions and peers.

    python benchmarks/first_hour.py [--seconds 420] [--output FOLDER] [--only CASE …] [--dry]

The cases run in the order of their value, each in a process of its own: the device and each release
of the assembler; kernels against fp64; decode, prefill, finetuning and cold adapters of an 8B model
against counts, transformers and peft; serving; `pytest -m gpu`, which compares programs and jobs
with transformers and peft; other sizes, and the kernels of groups. If a row takes too long or the
device no longer answers, the row fails, and a new process measures the rows after it.

FOLDER gets `first_hour.json`, written after each row; the table `first_hour.md`; and
`first_hour.log`. A second call with the same FOLDER measures the rows that are missing, and those
that failed in the first call. If FOLDER has no results, those of `.day/first_hour.json` count.

It needs one NVIDIA GPU of 80 GB, the source tree, torch, triton, transformers and peft. `make day`
puts the wheels of other packages and an assembler into `.day/`, from where they are unpacked if
they are not installed. `--dry` runs the same code in small sizes on a CPU, with kernels in Triton's
interpreter and a stand-in of a GPU.

The exit status is 1 if a row failed; a missed target does not change it.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import Any

import gpu_kernels
import gpu_model
import harness
from gpu_bench import Bench, Case, Ceilings, CudaTimer, Once, Row, measured
from gpu_device import ASSEMBLER, DEVICE, PYTEST

ROOT = harness.ROOT
DAY = ROOT / ".day"
SECONDS = 420.0
ROW_S, DRY_ROW_S = 120.0, 900.0
"""Time limits of a row on a GPU, and in the interpreter on a CPU that is shared.

The first row of a process imports torch, and compiles a program and its kernels.
"""
CLOSING_S = 4.0
"""Time to end the processes and to write the table."""
CHOICE = "PCG_PTXAS"
"""Variable that names the assembler (`pcg.kernels.triton`)."""
START = "its start"
"""Setting of the row that says why no row of a case was measured."""

# ---------------------------------------------------------------------------------------- results

FIRST = (DEVICE, ASSEMBLER)
"""Cases that every call measures, as each may run on another machine."""
CASES = (
    *FIRST, gpu_kernels.KERNELS, gpu_model.MODEL_CASE, gpu_model.SERVE_CASE, PYTEST,
    gpu_kernels.FURTHER, gpu_kernels.GROUPS,
)  # fmt: skip


@dataclass
class Results:
    """The rows that are known, kept in a file that is replaced as a whole.

    Attributes:
        rows: by case and setting, those of earlier calls included.
        finished: names of the cases that have no setting left.
        here: the rows that this call has measured.
    """

    folder: Path
    rows: dict[tuple[str, str], Row] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)
    here: set[tuple[str, str]] = field(default_factory=set, compare=False)

    @classmethod
    def of(cls, folder: Path) -> Results:
        """Read the results of a folder, or of `.day` where it has none."""
        found = cls(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for path in (found.path, DAY / found.path.name):
            if path.is_file():
                there = json.loads(path.read_text())
                rows = [Row(**fields) for fields in there["rows"]]
                found.rows = {(row.case, row.setting): row for row in rows}
                found.finished = set(there["finished"])
                break
        return found

    @property
    def path(self) -> Path:
        return self.folder / "first_hour.json"

    @property
    def ceilings(self) -> Ceilings:
        """The device's rates; 1 while they are not measured."""
        row = self.rows.get(("device", "ceilings"))
        return Ceilings(1.0, 1.0, 1.0) if row is None or row.failed else Ceilings(**row.details)

    def known(self, case: str) -> set[str]:
        """Return the settings that are not measured again."""
        keys = [key for key, row in self.rows.items() if not row.failed or key in self.here]
        return {setting for name, setting in keys if name == case}

    def add(self, row: Row) -> None:
        """Add a row and write the file; a new device or version drops all other rows."""
        key = row.case, row.setting
        before = self.rows.get(key)
        if key == ("device", "versions") and before and before.details != row.details:
            self.forget({case.name for case in CASES})
        self.rows.pop((row.case, START), None)  # of a process before this one
        self.rows[key] = row
        self.here.add(key)
        verdict = "FAILED" if row.failed else _time(row.ours_us) or "done"
        harness.note(f"{row.case}: {row.setting}: {verdict}  {row.note} ({row.took_s:.1f} s)")
        self.write()

    def forget(self, cases: Collection[str]) -> None:
        self.rows = {key: row for key, row in self.rows.items() if key[0] not in cases}
        self.finished -= {*cases}

    def write(self) -> None:
        rows = [row.to_json() for row in self.rows.values()]
        found = {"rows": rows, "finished": sorted(self.finished)}
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps({**found, "environment": harness.environment()}, indent=1) + "\n")
        new.replace(self.path)


def table(results: Results) -> str:
    """Format the rows as a Markdown table in the order of the cases, and name unfinished cases."""
    lines = [
        "| case | setting | measured | by count | measured / by count | peers | target | note |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in CASES:
        for row in (row for row in results.rows.values() if row.case == case.name):
            ratio = row.ours_us / row.predicted_us if row.ours_us and row.predicted_us else None
            ours = "**failed**" if row.failed else _cost(row.ours_us, row.ours_bytes)
            us = row.peers_us.items()
            peers = "; ".join(f"{name} {_cost(one, row.peers_bytes.get(name))}" for name, one in us)
            shown = "" if ratio is None else f"{ratio:.2f}"
            cells = (row.case, row.setting, ours, _time(row.predicted_us), shown, peers)
            cells += (_target(row), " ".join(row.note.split()).replace("|", "\\|"))
            lines.append(f"| {' | '.join(cells)} |")
    rows = results.rows.values()
    left = [case.name for case in CASES[len(FIRST) :] if case.name not in results.finished]
    lines += [
        "",
        f"{len(rows)} rows, {sum(row.failed for row in rows)} failed, "
        f"{sum(row.met is False for row in rows)} targets missed; "
        f"unfinished cases: {', '.join(left) or 'none'}.",
    ]
    return "\n".join(lines) + "\n"


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
    return f"{row.target}: {row.reached:.3g}, {'met' if row.met else '**missed**'}"


# -------------------------------------------------------------------------------------- processes


def prepared(day: Path, folder: Path) -> dict[str, str]:
    """Unpack the packages that are not installed, and the assembler as `ptxas`, into a folder.

    Returns:
        The environment variables of the processes that use them.
    Raises:
        SystemExit: a wheel that is needed is for another version of Python.
    """
    site = folder / "site"
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    for wheel in sorted(day.glob("*.whl")):
        if find_spec(wheel.name.partition("-")[0]) is not None:
            continue
        if f"-{tag}-" not in wheel.name and "-none-any" not in wheel.name:
            raise SystemExit(
                f"error: {wheel.name} is not for this Python; prepare .day again by "
                f"`make day DAY_PYTHON={sys.version_info.major}.{sys.version_info.minor}`"
            )
        zipfile.ZipFile(wheel).extractall(site)
    packed = day / "ptxas.xz"
    if packed.is_file():
        path = folder / "ptxas"
        path.write_bytes(lzma.decompress(packed.read_bytes()))
        path.chmod(0o755)
    paths = [str(site), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PATH": os.pathsep.join([str(folder), os.environ.get("PATH", "")]),  # assemblers are there
        "HF_HUB_OFFLINE": "1",  # without a network a hub takes long to fail
    }


@dataclass
class Hour:
    """Runs cases one after another until a deadline.

    Attributes:
        command: the command line of a process that measures a case, to which its name is added.
        variables: environment variables of the processes.
        row_s: time limit of a row, seconds.
        until: the deadline, a time of `monotonic`.
    """

    results: Results
    command: Sequence[str]
    variables: Mapping[str, str]
    row_s: float
    until: float

    def begin(self, most: int | None = None) -> bool:
        """Measure the device and each assembler; the other cases use the newest that is right.

        Args:
            most: limit of the assemblers, that of Triton first; None for none.
        Returns:
            True if there is a device.
        """
        self.results.forget({ASSEMBLER.name})
        self.run(DEVICE, self.until)
        rows = [row for row in self.results.rows.values() if row.case == DEVICE.name]
        if not rows or any(row.failed for row in rows):
            return False
        versions = self.results.rows[DEVICE.name, "assemblers"].details
        chosen = None
        for path in sorted([*versions][:most], key=versions.__getitem__):
            before = {*self.results.here}
            self.run(ASSEMBLER, self.until, {CHOICE: path})
            new = self.results.here - before
            if new and not any(self.results.rows[key].failed for key in new):
                chosen = path
        self.variables = {**self.variables, **({CHOICE: chosen} if chosen else {})}
        return True

    def run_all(self, cases: Sequence[Case]) -> None:
        """Run each case for its seconds, then those that are unfinished."""
        for is_capped in (True, False):
            for case in cases:
                failed = {key for key, row in self.results.rows.items() if row.failed}
                is_left = any(key[0] == case.name for key in failed - self.results.here)
                if case.name not in self.results.finished or (is_capped and is_left):
                    soft = monotonic() + case.seconds if is_capped else self.until
                    self.run(case, min(soft, self.until))

    def run(self, case: Case, soft: float, more: Mapping[str, str] | None = None) -> None:
        """Run a case, in a new process after one has ended; no setting begins after `soft`."""
        self.results.finished.discard(case.name)
        while monotonic() < soft:
            before = len(self.results.here)
            self._run_process(case, soft, more or {})
            if case.name in self.results.finished or len(self.results.here) == before:
                return

    def _run_process(self, case: Case, soft: float, more: Mapping[str, str]) -> None:
        """Measure rows in a process, which is ended if a row exceeds its limit."""
        skipped = self.results.known(case.name) if case not in FIRST else set()
        with tempfile.NamedTemporaryFile("w+") as messages:
            rows = [row.to_json() | {"details": {}} for row in self.results.rows.values()]
            order = {"skipped": sorted(skipped), "seconds": soft - monotonic(), "rows": rows}
            order |= {"ceilings": vars(self.results.ceilings), "messages": messages.name}
            process = subprocess.Popen(
                [*self.command, case.name, json.dumps(order)],
                stdout=(log := self.results.path.with_suffix(".log").open("a")),
                stderr=log,
                env={**os.environ, **self.variables, **more},
                start_new_session=True,  # its children end with it
            )
            setting, since, why = START, monotonic(), ""
            while not why:
                is_alive = process.poll() is None
                for line in messages.readlines():
                    message, since = json.loads(line), monotonic()
                    setting = message.get("begun", setting)
                    if "row" in message:
                        self.results.add(Row(**message["row"]))
                    if message.get("is_over"):
                        self.results.finished.add(case.name)
                if not is_alive:
                    why = f"its process ended with status {process.returncode}"
                elif monotonic() > self.until:
                    why = "the time is over"
                elif monotonic() - since > self.row_s:
                    why = f"took longer than {self.row_s:.0f} s"
                else:
                    time.sleep(0.02)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            log.close()
        is_measured = (case.name, setting) in self.results.here and setting != START
        is_well = process.returncode == 0 or monotonic() > self.until or is_measured
        if not is_well:
            self.results.add(Row.failure(case.name, setting, why))
        self.results.write()


def work(name: str, order: Mapping[str, Any], is_dry: bool) -> None:
    """Measure the settings of a case, and write each row as a message."""
    import torch

    from pcg.parent_process import end_with_parent

    end_with_parent(os.getppid())
    if is_dry:
        import gpu_dry

    def say(**message: Any) -> None:
        with Path(order["messages"]).open("a") as file:
            file.write(json.dumps(message) + "\n")

    case = next(case for case in CASES if case.name == name)
    known = {(row["case"], row["setting"]): Row(**row) for row in order["rows"]}
    until, device = monotonic() + order["seconds"], "cpu" if is_dry else "cuda"
    timer: Any = Once() if is_dry else CudaTimer()
    bench = Bench(timer, Ceilings(**order["ceilings"]), known, until, eager_device=device)
    with gpu_dry.small() if is_dry and case is not PYTEST else nullcontext():
        try:
            for setting, row in measured(bench, case, order["skipped"]):
                say(**({"begun": setting} if row is None else {"row": row.to_json()}))
                if row is not None and row.failed:
                    print(f"{name}: {setting}: {row.note}", file=sys.stderr, flush=True)
                    torch.cuda.synchronize()  # an error if the device no longer answers
        except TimeoutError:
            return
        except Exception as error:
            traceback.print_exc()
            why = f"{type(error).__name__}: {error}"
            say(row=Row.failure(name, "the rest", why).to_json())
            raise SystemExit(1) from None
    say(is_over=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; see the module."""
    began = monotonic()
    names = [case.name for case in CASES[len(FIRST) :]]
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=SECONDS, help="420 by default")
    output = harness.RESULTS / "first_hour"
    parser.add_argument("--output", type=Path, default=output, metavar="FOLDER")
    parser.add_argument(
        "--only", nargs="+", choices=names, metavar="CASE", help=f"again: {', '.join(names)}"
    )
    parser.add_argument("--dry", action="store_true", help="small, on a CPU")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.work:
        work(given.work[0], json.loads(given.work[1]), given.dry)
        return 0
    results = Results.of(given.output)
    results.forget(given.only or ())
    with tempfile.TemporaryDirectory() as folder:
        variables = prepared(DAY, Path(folder)) | {"TRITON_INTERPRET": str(int(given.dry))}
        command = [sys.executable, __file__, *["--dry"] * given.dry, "--work"]
        until = began + given.seconds - CLOSING_S
        hour = Hour(results, command, variables, DRY_ROW_S if given.dry else ROW_S, until)
        if not hour.begin(1 if given.dry else None):
            why = "no NVIDIA GPU, or it fails" if monotonic() < until else "the seconds are over"
            log = results.path.with_suffix(".log")
            print(f"error: {why}; see {log}; --dry needs no GPU", file=sys.stderr)
            return 1
        hour.run_all([case for case in CASES[len(FIRST) :] if case.name in (given.only or names)])
    text = table(results)
    results.path.with_suffix(".md").write_text(text)
    print(text)
    return int(any(row.failed for row in results.rows.values()))


if __name__ == "__main__":
    sys.exit(main())
