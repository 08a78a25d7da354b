"""Count the Python calls of pcg in an engine's steps, and compare their time with another tree's.

    python benchmarks/bench_engine_calls.py [--against TREE] [--rounds 15]

A random Llama of 4 layers decodes 1 and 16 sequences greedily; then an engine without requests
finetunes the shipped model. Counted are calls, files and functions of `pcg/` in a warm step; the
emitted functions of a program do not count. With `--against`, a checkout of another commit, both
trees decode by turns, and the ratio of processor times a token is the median of the rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pcg

ROOT = Path(__file__).parent.parent
SEQUENCES = (1, 16)
STEPS, WARM_STEPS = 40, 30
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 2048,
}
ROWS = [{"prompt": "def f(x):", "completion": " return x\n"}] * 8


def engines() -> dict[int, Any]:
    """Return a warm engine for each number of sequences."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.set_num_threads(1)
    torch.manual_seed(0)
    executor = pcg.compile(AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)))
    warm = {}
    for count in SEQUENCES:
        engine = warm[count] = executor.engine(pcg.Limits(running=32))
        for number in range(count):
            prompt = [1 + number, 2, 3, 4, 5]
            engine.submit(executor.request(prompt, max_new_tokens=1500, temperature=0.0))
        for _ in range(WARM_STEPS):
            engine.step()
    return warm


def counted(act: Callable[[], object], steps: int) -> dict[str, float]:
    """Return the calls of pcg in a step, and the files and functions that the steps enter."""
    calls: Counter[tuple[str, str]] = Counter()

    def note(frame: Any, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(Path(pcg.__file__).parent)):
            calls[code.co_filename, code.co_qualname] += 1

    sys.setprofile(note)
    act()
    sys.setprofile(None)
    files = {file for file, _ in calls}
    return {"calls": calls.total() / steps, "files": len(files), "functions": len(calls)}


def decoding(engine: Any) -> dict[str, float]:
    """Return the counts of decode steps."""
    return counted(lambda: [engine.step() for _ in range(STEPS)], STEPS)


def training() -> dict[str, float]:
    """Return the counts of two optimizer steps of a job."""
    executor = pcg.compile(ROOT / "examples/checkpoint", peft="lora", dtype="float32")
    engine = executor.engine()
    job = engine.finetune(ROWS, adapter="mine", epochs=4, batch_size=2)
    while job.steps < 2:
        engine.step()

    def train() -> None:
        while job.steps < 4:
            engine.step()

    return counted(train, 2)


def work() -> None:
    """Decode as many sequences as each line says; answer by the processor time of a token."""
    warm = engines()
    print("ready", flush=True)
    for line in sys.stdin:
        count, began_s = int(line), time.process_time()
        for _ in range(STEPS):
            warm[count].step()
        print((time.process_time() - began_s) / STEPS / count, flush=True)


def ratios(other: Path, rounds: int) -> dict[str, float]:
    """Return the processor time of a token relative to another tree's, by sequences."""
    workers = []
    for tree in (ROOT, other):
        variables = {**os.environ, "PYTHONPATH": str(tree.resolve()), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--work"]
        pipe: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        workers.append(subprocess.Popen(command, cwd=tree, env=variables, **pipe))
    for worker in workers:
        while worker.stdout.readline().strip() != "ready":
            if worker.poll() is not None:
                raise SystemExit("error: a tree cannot run the benchmark; its message is above")

    def seconds(worker: Any, count: int) -> float:
        print(count, file=worker.stdin, flush=True)
        return float(worker.stdout.readline())

    result = {}
    for count in SEQUENCES:
        pairs = [[seconds(worker, count) for worker in workers] for _ in range(rounds)]
        result[str(count)] = round(statistics.median(here / there for here, there in pairs), 3)
    for worker in workers:
        worker.kill()
        worker.wait()
    return result


def main() -> None:
    """Write the counts, and the ratios to another tree."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--against", type=Path, help="a checkout of another commit")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work()
        return
    from measure import write

    result: dict[str, Any] = {
        "decode step": {str(count): decoding(engine) for count, engine in engines().items()},
        "a job's step": training(),
    }
    if arguments.against is not None:
        result["processor time, relative"] = ratios(arguments.against, arguments.rounds)
    write("engine_calls", result)


if __name__ == "__main__":
    main()
