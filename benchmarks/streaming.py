"""Data larger than memory: resident memory of a run that streams, and cores that tokenize.

`streaming` finetunes the model of examples/checkpoint on a file of JSON lines, in a process of its
own. Its memory is the proportional set size of the process and of those that it started, twenty
times a second: at most, less what it has after a run on sixteen rows in memory, which stands for
the model. `tokenize_cores` reads the same rows of a file by one process and by two, in turn.
"""

from __future__ import annotations

import json
import random
import tempfile
import threading
import time
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import harness as bench

import pcg
from pcg.runtime.data.dataset import ReadOptions
from pcg.runtime.data.example import ModelSizes
from pcg.runtime.data.streaming import StreamedRows, streamed
from pcg.runtime.text.tokenizer import Tokenizer

MAX_LENGTH = 256
MB = 10**6


def write_rows(path: Path, size_bytes: int) -> int:
    """Write distinct rows of about a kilobyte; return their number."""
    source = "".join(sorted(p.read_text() for p in (bench.ROOT / "pcg").glob("*.py")))
    drawn, rows, written = random.Random(0), 0, 0
    with path.open("w") as file:
        while written < size_bytes:
            begin = drawn.randrange(len(source) - 900)
            row = {"prompt": f"# {rows}\n", "completion": source[begin : begin + 900]}
            written += file.write(json.dumps(row) + "\n")
            rows += 1
    return rows


def memory_mb() -> float:
    """Return the proportional set size of this process and of those that it started, MB."""
    tasks = Path("/proc/self/task").iterdir()
    started = [pid for task in tasks for pid in (task / "children").read_text().split()]
    total = 0
    for pid in ("self", *started):
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total * 1024 / MB


def finetune(pipe: Any, path: Path, steps: int) -> None:
    bench.prepare()
    executor = pcg.compile(str(bench.CHECKPOINT), dtype="float32")
    options: dict[str, Any] = {
        "max_length": MAX_LENGTH, "batch_size": 8, "max_steps": steps, "progress": False,
        "peft": bench.LORA,
    }  # fmt: skip
    with path.open() as file:
        rows = [json.loads(line) for line in islice(file, 16)]
    executor.finetune(rows, "memory", **options)
    before = most = memory_mb()
    is_over = threading.Event()

    def watch() -> None:
        nonlocal most
        while not is_over.wait(0.05):
            most = max(most, memory_mb())

    watching = threading.Thread(target=watch)
    watching.start()
    began, first_s = time.monotonic(), 0.0

    def on_step(record: pcg.StepRecord) -> None:
        nonlocal first_s
        first_s = first_s or time.monotonic() - began

    executor.finetune(path, "streamed", streaming=True, on_step=on_step, **options)
    is_over.set()
    watching.join()
    pipe.send({"model": before, "most": most, "first_step_s": first_s})


@bench.case("streaming", "rows", "first step, s", size_gb=0.05, steps=4)
def streaming(size_gb: float = 10.0, steps: int = 100) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        rows = write_rows(path, int(size_gb * 1e9))
        with bench.started(finetune, path, steps) as process:
            measured = process.answer()
        size = path.stat().st_size
    return {
        "rows": rows,
        "size_gb": round(size / 1e9, 2),
        "steps": steps,
        "memory of the model and its training, MB": round(measured["model"]),
        "memory beyond it, MB (at most 300)": round(measured["most"] - measured["model"]),
        "first step, s": round(measured["first_step_s"], 1),
    }


@bench.case("tokenize_cores", "tokens/s: 1", "tokens/s: 2", size_mb=4, rounds=1)
def tokenize_cores(size_mb: int = 16, rounds: int = 5) -> dict[str, Any]:
    import numpy as np

    tokenizer = Tokenizer.load(bench.CHECKPOINT)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        write_rows(path, size_mb * MB)
        read = ReadOptions(max_length=MAX_LENGTH)
        rows = streamed(
            [(path,)], tokenizer, read, ModelSizes(tokenizer.vocab_size, tokenizer.vocab_size, None)
        ).examples
        assert isinstance(rows, StreamedRows)

        def rate(workers: int) -> float:
            reading = rows.read_ahead(np.arange(len(rows)), workers)
            for _ in range(256):  # until all processes have started
                next(reading)
            began, tokens = time.perf_counter(), 0
            for example in reading:
                tokens += len(example.ids)
            return tokens / (time.perf_counter() - began)

        rates = bench.interleave({"1": lambda: rate(1), "2": lambda: rate(2)}, rounds)
    return {
        "rows": len(rows),
        "tokens/s": bench.medians(rates, 0),
        "two processes to one (at least 1.3)": bench.ratio(rates, "2", "1"),
    }


if __name__ == "__main__":
    bench.main()
