"""The first hour on a GPU: correctness first, then whole steps against predictions and peers.

    python benchmarks/first_hour.py [--seconds 420] [--output FOLDER] [--only CASE …] [--dry]

The cases run in the order of their value: the device and each release of the assembler; kernels
against fp64; programs, recorded jobs and greedy tokens against transformers and peft; decode,
prefill, finetuning, co-serving and cold adapters of an 8B model against counts, transformers and
peft; serving; `pytest -m gpu`; other sizes. One process measures one case after another. If a row
takes too long or the device no longer answers, the row fails, and a new process measures the rows
behind it.

FOLDER gets `first_hour.json`, written after each row; the table `first_hour.md`; and
`first_hour.log`. A second call with the same FOLDER measures the rows that are missing, then those
that failed in the first call. If FOLDER has no results, those of `.day/first_hour.json` count.

It needs one NVIDIA GPU of 80 GB, the source tree, torch, triton, transformers and peft. `make day`
puts the wheels of other packages and an assembler into `.day/`, from where they are unpacked if
they are not installed. `--dry` runs the same code in small sizes on a CPU, with kernels in Triton's
interpreter and a stand-in of a GPU.

The exit status is 1 if a row failed; a missed target does not change it.
"""

from __future__ import annotations

import argparse
import gc
import json
import lzma
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import Any

import gpu_correctness
import gpu_groups
import gpu_kernels
import gpu_model
import gpu_pytest
from gpu_case import Bench, Case, CudaTimer, Once, Row, measured
from gpu_work import Ceilings
from measure import RESULTS

ROOT = Path(__file__).parents[1]
DAY = ROOT / ".day"
SECONDS = 420.0
ROW_S = 120.0
"""Time limit of a row; the first row of a process compiles a program and its kernels."""
DRY_ROW_S = 900.0
"""Time limit of a row in the interpreter, on a CPU that is shared."""
CLOSING_S = 4.0
"""Time to end the processes and to write the table."""
FIRST = (gpu_correctness.DEVICE, gpu_correctness.ASSEMBLER)
"""Cases that every call measures, as each may run on another machine."""
KERNELS, FURTHER_KERNELS = gpu_kernels.CASES
CASES: tuple[Case, ...] = (
    *FIRST,
    KERNELS,
    *gpu_correctness.CASES,
    *gpu_model.CASES,
    gpu_pytest.CASE,
    gpu_model.FURTHER,
    FURTHER_KERNELS,
    *gpu_groups.CASES,
)
CHOICE = "PCG_PTXAS"
"""Variable that names the assembler (`pcg.kernels.triton`)."""
START = "its start"
"""Setting of the row that says why no row of a case was measured."""
_MARK = "first-hour "
"""Prefix of the messages among the lines that a process prints."""


# ---------------------------------------------------------------------------------------- results


@dataclass
class Results:
    """The rows that are known, kept in a file that is replaced as a whole.

    Attributes:
        rows: by case and setting, those of earlier calls included.
        finished: names of the cases that have no setting left.
    """

    folder: Path
    rows: dict[tuple[str, str], Row] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, folder: Path) -> Results:
        """The results of a folder, or of `.day` where it has none."""
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

    def add(self, row: Row) -> None:
        """Add a row and write the file; a new device or version drops all other rows."""
        key = row.case, row.setting
        before = self.rows.get(key)
        if key == ("device", "versions") and before and before.details != row.details:
            self.forget({case.name for case in CASES})
        self.rows[key] = row
        verdict = "FAILED" if row.failed else _time(row.ours_us) or "done"
        said = f"{row.case}: {row.setting}: {verdict}  {row.note} ({row.took_s:.1f} s)"
        print(said, file=sys.stderr, flush=True)
        self.write()

    def forget(self, cases: Collection[str]) -> None:
        """Drop all rows of these cases."""
        self.rows = {key: row for key, row in self.rows.items() if key[0] not in cases}
        self.finished -= {*cases}

    def drop(self, case: str, settings: Collection[str]) -> None:
        """Drop rows of a case before they are measured again."""
        for setting in settings:
            self.rows.pop((case, setting), None)
        self.finished.discard(case)

    def write(self) -> None:
        found = {
            "rows": [row.to_json() for row in self.rows.values()],
            "finished": sorted(self.finished),
            "command": " ".join(["python", *sys.argv]),
        }
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(found, indent=1) + "\n")
        new.replace(self.path)

    @property
    def ceilings(self) -> Ceilings | None:
        """The device's rates; None while they are not measured."""
        row = self.rows.get(("device", "ceilings"))
        return None if row is None or row.failed else Ceilings(**row.details)


def table(results: Results) -> str:
    """Format the rows as a Markdown table in the order of the cases, and name unfinished cases."""
    lines = [
        "| case | setting | measured | by count | measured / by count | peers | target | note |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in CASES:
        for row in (row for row in results.rows.values() if row.case == case.name):
            ratio = row.ours_us / row.predicted_us if row.ours_us and row.predicted_us else None
            cells = (
                row.case,
                row.setting,
                "**failed**" if row.failed else _cost(row.ours_us, row.ours_bytes),
                _time(row.predicted_us),
                "" if ratio is None else f"{ratio:.2f}",
                "; ".join(
                    f"{name} {_cost(us, row.peers_bytes.get(name))}"
                    for name, us in row.peers_us.items()
                ),
                _target(row),
                " ".join(row.note.split()).replace("|", "\\|"),
            )
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


class Worker:
    """A process that measures the cases that it is given.

    Args:
        command: the command line of the process, which calls `work`.
        variables: environment variables beside those of this process.
        log: file for its standard error, and for lines of its standard output without a message.
        row_s: time limit of a row, seconds.
    """

    def __init__(
        self, command: Sequence[str], variables: Mapping[str, str], log: Path, row_s: float = ROW_S
    ) -> None:
        self._row_s = row_s
        self._log = log.open("a")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **variables},
            start_new_session=True,  # what it has started ends with it
        )
        self._messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_MARK):
                self._messages.put(json.loads(line.removeprefix(_MARK)))
            elif line.strip():
                self._log.write(line)
                self._log.flush()
        self._messages.put(None)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def begin(self, order: Mapping[str, Any]) -> None:
        """Send the process a case to measure."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, which is seen where messages are read
            print(json.dumps(order), file=self._process.stdin, flush=True)

    def rows(self, case: str, until: float) -> Iterator[Row | None]:
        """Yield the rows of the case that was sent, then None if no setting is left.

        The process is ended if a row exceeds its limit, and at the time `until` of `monotonic`.
        """
        setting = START
        while True:
            row_until = monotonic() + self._row_s
            try:
                message = self._messages.get(timeout=max(0.0, min(row_until, until) - monotonic()))
            except queue.Empty:
                self.end()
                if row_until <= until:
                    yield Row.failure(case, setting, f"took longer than {self._row_s:.0f} s")
                return
            if message is None:
                self._process.wait()
                status = self._process.returncode
                yield Row.failure(case, setting, f"its process ended with status {status}")
                return
            if "begun" in message:
                setting = message["begun"]
            elif "row" in message:
                yield Row(**message["row"])
            else:
                if message.get("is_broken"):
                    self.end()
                elif message["is_over"]:
                    yield None
                return

    def end(self) -> None:
        """End the process and its children."""
        if self.is_alive:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join(5.0)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        if not self._reader.is_alive():  # nothing that it had started holds the pipe
            self._process.stdout.close()
            self._log.close()


def work(is_dry: bool) -> None:
    """Read cases from the standard input, measure them, and print their rows as messages.

    The process ends with its input, that is, with the process that started it.
    """
    orders: queue.SimpleQueue[str] = queue.SimpleQueue()
    given = os.fdopen(os.dup(sys.stdin.fileno()))  # pytest replaces the standard input

    def read() -> None:
        for line in given:
            orders.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    import peft  # noqa: F401  # cases import it
    import torch
    import transformers  # noqa: F401

    import pcg.compiler  # noqa: F401

    if is_dry:
        import gpu_dry

    timer: Any = Once() if is_dry else None
    while True:
        order = json.loads(orders.get())
        case = next(case for case in CASES if case.name == order["case"])
        timer = timer or CudaTimer()
        known = {(row["case"], row["setting"]): Row(**row) for row in order["rows"]}
        until = monotonic() + order["seconds"]
        ceilings = Ceilings(*order["ceilings"])
        bench = Bench(timer, ceilings, known, until, eager_device="cpu" if is_dry else "cuda")
        with gpu_dry.small() if is_dry and not case.alone else nullcontext():
            is_over = _measure(bench, case, order["skipped"])
            gc.collect()
            torch.cuda.empty_cache()
        _say({"is_over": is_over})


def _measure(bench: Bench, case: Case, skipped: Collection[str]) -> bool:
    """Measure the settings of a case; return True if none is left."""
    try:
        for setting, row in measured(bench, case, skipped):
            if row is None:
                _say({"begun": setting})
                continue
            _say({"row": row.to_json()})
            if row.failed:
                print(f"{case.name}: {setting}: {row.note}", file=sys.stderr, flush=True)
                _check_device()
    except TimeoutError:
        return False
    except Exception as error:
        traceback.print_exc()
        why = f"{type(error).__name__}: {error}"
        _say({"row": Row.failure(case.name, "the rest", why).to_json()})
    return True


def _check_device() -> None:
    """End the process if the device no longer answers, as after an illegal memory access."""
    import torch

    try:
        torch.cuda.synchronize()
    except Exception:
        traceback.print_exc()
        _say({"is_over": False, "is_broken": True})
        os._exit(1)


def _say(message: Mapping[str, Any]) -> None:
    print(f"\n{_MARK}{json.dumps(message)}", flush=True)


# ------------------------------------------------------------------------------------------- main


class Hour:
    """Runs cases one after another until a deadline.

    Args:
        start: function that starts a process with further environment variables.
        until: the deadline, a time of `monotonic`.
    """

    def __init__(self, results: Results, start: Any, until: float) -> None:
        self._results, self._start, self._until = results, start, until
        self._variables: Mapping[str, str] = {}
        self._worker: Worker | None = None
        self._here: set[tuple[str, str]] = set()
        """Keys of the rows that this call has measured."""

    def begin(self, most: int | None = None) -> bool:
        """Measure the device, and each assembler in a process of its own.

        All other cases use the newest assembler that is right.

        Args:
            most: limit of the assemblers, that of Triton first; None for none.
        Returns:
            True if there is a device.
        """
        device, assembler = FIRST
        self._results.forget({assembler.name})
        first = self._start({})
        workers = [first]
        try:
            self._tell(first, device, (), self._left_s)
            if not self._take(first, device):
                return False
            versions = self._results.rows[device.name, "assemblers"].details
            paths = [*versions][:most]
            workers += [self._start({CHOICE: path}) for path in paths[1:]]
            by_path = dict(zip(paths, workers, strict=True))
            for worker in workers:
                self._tell(worker, assembler, (), self._left_s)
            for path in sorted(paths, key=versions.__getitem__, reverse=True):
                if self._take(by_path[path], assembler) and self._worker is None:
                    self._worker, self._variables = by_path[path], {CHOICE: path}
            return True
        finally:
            for worker in workers:
                if worker is not self._worker:
                    worker.end()

    def run(self, cases: Sequence[Case]) -> None:
        """Run each case for its seconds, then unfinished ones, then rows that failed before."""
        for is_capped in (True, False):
            for case in cases:
                seconds = case.seconds if is_capped else self._left_s
                if case.name not in self._results.finished:
                    known = [key for key in self._results.rows if key[0] == case.name]
                    self._run(case, {setting for _, setting in known}, seconds)
        for case in cases:
            rows = [row for row in self._results.rows.values() if row.case == case.name]
            again = {
                row.setting for row in rows
                if row.failed and (case.name, row.setting) not in self._here
            }  # fmt: skip
            if again and self._left_s:
                self._results.drop(case.name, again)
                self._run(case, {row.setting for row in rows} - again, self._left_s)
        if self._worker is not None:
            self._worker.end()

    @property
    def _left_s(self) -> float:
        return max(0.0, self._until - monotonic())

    def _run(self, case: Case, skipped: set[str], seconds: float) -> None:
        """Run a case, in a new process after one has ended."""
        soft = monotonic() + min(seconds, self._left_s)
        while monotonic() < soft:
            if case.alone and self._worker is not None:
                self._worker.end()
            if self._worker is None or not self._worker.is_alive:
                self._worker = self._start(self._variables)
            self._tell(self._worker, case, skipped, soft - monotonic())
            before = len(self._here)
            self._take(self._worker, case)
            skipped |= {setting for name, setting in self._here if name == case.name}
            if case.name in self._results.finished or len(self._here) == before:
                break
        if case.alone and self._worker is not None:
            self._worker.end()

    def _tell(self, worker: Worker, case: Case, skipped: Collection[str], seconds: float) -> None:
        ceilings = self._results.ceilings
        worker.begin(
            {
                "case": case.name,
                "skipped": sorted(skipped),
                "seconds": seconds,
                "ceilings": [1.0] * 3 if ceilings is None else [*vars(ceilings).values()],
                "rows": [replace(row, details={}).to_json() for row in self._results.rows.values()],
            }
        )

    def _take(self, worker: Worker, case: Case) -> bool:
        """Add the rows of a case; return True if there are some and none failed."""
        rows = []
        for row in worker.rows(case.name, self._until):
            if row is None:
                self._results.rows.pop((case.name, START), None)  # of a process before this one
                self._results.finished.add(case.name)
                self._results.write()
            else:
                rows.append(row)
                self._here.add((row.case, row.setting))
                self._results.add(row)
        return bool(rows) and not any(row.failed for row in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; see the module."""
    began = monotonic()
    names = [case.name for case in CASES[len(FIRST) :]]
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=SECONDS, help="420 by default")
    parser.add_argument("--output", type=Path, default=RESULTS / "first_hour", metavar="FOLDER")
    parser.add_argument(
        "--only", nargs="+", choices=names, metavar="CASE", help=f"again: {', '.join(names)}"
    )
    parser.add_argument("--dry", action="store_true", help="small, on a CPU")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.worker:
        work(given.dry)
        return 0
    results = Results.of(given.output)
    if given.only:
        results.forget(given.only)
    with tempfile.TemporaryDirectory() as folder:
        variables = prepared(DAY, Path(folder)) | {"TRITON_INTERPRET": str(int(given.dry))}
        command = [sys.executable, __file__, "--worker", *["--dry"] * given.dry]
        log = results.path.with_suffix(".log")

        def start(more: Mapping[str, str]) -> Worker:
            return Worker(command, {**variables, **more}, log, DRY_ROW_S if given.dry else ROW_S)

        until = began + given.seconds - CLOSING_S
        hour = Hour(results, start, until)
        if not hour.begin(1 if given.dry else None):
            why = "no NVIDIA GPU, or it fails" if monotonic() < until else "the seconds are over"
            print(f"error: {why}; see {log}; --dry needs no GPU", file=sys.stderr)
            return 1
        hour.run([case for case in CASES[len(FIRST) :] if case.name in (given.only or names)])
    text = table(results)
    results.path.with_suffix(".md").write_text(text)
    print(text)
    return int(any(row.failed for row in results.rows.values()))


if __name__ == "__main__":
    sys.exit(main())
