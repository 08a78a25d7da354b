"""The processes of `bench_split.py`: bases, clients, peers and engines, and what each takes.

A process is this file with a role. It prints a line once it is ready, and then does what it reads,
one line of JSON at a time, and prints a line for each:

    {"steps": n}        finetune for n steps → seconds of each, the first loss
    {"until": t}        go on until t on the monotonic clock → tokens, seconds of each step
    {"stats": true}     → what the base has run for all its clients so far
    {"end": true}       end
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KEY = "key-of-the-benchmark"
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
RECIPE: dict[str, Any] = {
    "r": 8,
    "lora_alpha": 16,
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
}
"""The paper's LoRA 3."""


@dataclass(frozen=True)
class Work:
    """The work of a client or peer.

    Attributes:
        kind: `train`, or `serve`.
        batch: sequences of a step, or prompts that are continued together.
        sequence: tokens of a sequence, or of a prompt.
        rank: of the adapter.
        seed: of the tokens.
    """

    kind: str
    batch: int
    sequence: int
    rank: int = 8
    seed: int = 1

    def rows(self) -> list[list[int]]:
        """Return its token ids."""
        from random import Random

        random = Random(self.seed)
        return [random.choices(range(5, 5000), k=self.sequence) for _ in range(self.batch)]


# ---------------------------------------------------------------------------------- in a process


def client(
    directory: str,
    where: str,
    transport: str,
    work: Work,
    program: str | None = None,
    saves: str | None = None,
    connecting: Mapping[str, Any] | None = None,
) -> None:
    """Be a client of a base; its model is the base's.

    Args:
        program: the folder of the program that it loads; None to compile one.
        saves: a folder that it writes its program to, and ends.
        connecting: further arguments of `pcg.connect`, the fields of `Privacy` among them.
    """
    import torch

    import pcg
    from pcg.runtime.data.example import Example

    torch.set_num_threads(1)
    recipe = pcg.LoraConfig(**{**RECIPE, "r": work.rank})
    given: Any = {"transport": transport, "api_key": KEY, "connect_s": 120, "lost_s": 120}
    given |= {**(connecting or {}), "program": program}
    if "privacy" in given:
        given["privacy"] = pcg.Privacy(**given["privacy"])
    executor = pcg.connect(where, peft={"mine": recipe}, **given)
    if saves is not None:
        executor.save_program(saves)
        executor.close()
        return
    rows = work.rows()
    if work.kind == "serve":
        serve(executor, rows)
        return
    runner = executor.training_runner("mine")
    examples = [Example(row, row) for row in rows]
    optimizer = torch.optim.AdamW(list(runner.parameters.values()), lr=1e-4)
    count = sum(one.targets for one in examples)

    def step() -> float:
        loss = float(runner.forward_backward(examples, count)) / count
        optimizer.step()
        optimizer.zero_grad()
        return loss

    obey(step, work.batch * work.sequence, lambda: executor.caller.call("stats").fields)
    executor.close()


def serve(executor: Any, rows: Sequence[Sequence[int]]) -> None:
    """Continue prompts token by token; a step is one token of each."""
    chunks: Iterator[Any] = iter(())
    left = 0

    def step() -> float:
        nonlocal chunks, left
        if not left:
            left = 64
            options: Any = {"max_new_tokens": left, "temperature": 0, "ignore_eos": True}
            chunks = executor.generate(rows, "mine", stream=True, **options)
        left -= 1
        for _ in rows:
            next(chunks)
        return 0.0

    obey(step, len(rows), lambda: executor.caller.call("stats").fields)
    executor.close()


def peer(directory: str, work: Work) -> None:
    """Be transformers + peft with a model of its own."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    wrapped = get_peft_model(model, LoraConfig(**{**RECIPE, "r": work.rank})).train()
    optimizer = torch.optim.AdamW([p for p in wrapped.parameters() if p.requires_grad], lr=1e-4)
    ids = torch.tensor(work.rows())

    def step() -> float:
        loss = wrapped(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    obey(step, work.batch * work.sequence, dict)


def whole(directory: str, work: Work, count: int) -> None:
    """Be an undivided engine, whose jobs train as many adapters in the same steps."""
    import torch

    import pcg
    from pcg.runtime.data.example import Example

    torch.set_num_threads(1)
    executor = pcg.compile(directory, dtype="float32")
    works = [dataclasses.replace(work, seed=seed) for seed in range(count)]
    examples = [[Example(row, row) for row in one.rows()] for one in works]
    options = {"batch_size": work.batch, "learning_rate": 1e-4, "weight_decay": 0.01}
    with executor.engine(kv_cache_bytes=2**28).start() as engine:
        say({"ready": True})
        for round_, line in enumerate(sys.stdin):
            order = json.loads(line)
            if "end" in order:
                return
            given = {**options, "peft": pcg.LoraConfig(**RECIPE), "max_steps": order["steps"]}
            begun = time.monotonic()
            jobs = [
                engine.finetune(rows, f"mine-{round_}-{at}", **given)
                for at, rows in enumerate(examples)
            ]
            losses = [job.wait().losses[0] for job in jobs]
            tokens = count * work.batch * work.sequence * order["steps"]
            seconds = [time.monotonic() - begun]
            say({"seconds": seconds, "tokens": tokens, "first_losses": losses})


def obey(step: Callable[[], float], tokens: int, stats: Callable[[], object]) -> None:
    """Do what standard input says, line by line."""
    say({"ready": True})
    for line in sys.stdin:
        order = json.loads(line)
        if "end" in order:
            return
        if "stats" in order:
            say(stats())
            continue
        times: list[float] = []
        first = None
        while len(times) < order.get("steps", 1e9) and time.monotonic() < order.get("until", 1e18):
            begun = time.monotonic()
            loss = step()
            times.append(time.monotonic() - begun)
            first = loss if first is None else first
        say({"seconds": times, "tokens": tokens * len(times), "first_loss": first})


def say(what: object) -> None:
    """Print a line."""
    print(json.dumps(what), flush=True)


# ------------------------------------------------------------------------------- of the processes


@dataclass
class Process:
    """A process that was started."""

    name: str
    popen: subprocess.Popen[str]
    said: list[str] = field(default_factory=list)

    def order(self, what: Mapping[str, object]) -> None:
        """Tell it to do something."""
        assert self.popen.stdin is not None
        self.popen.stdin.write(json.dumps(what) + "\n")
        self.popen.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Return what it says next."""
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        if not line:
            raise SystemExit(f"error: {self.name} ended with {self.popen.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def cpu_s(self) -> float:
        """Return the processor time that it has used, s."""
        fields = Path(f"/proc/{self.popen.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * TICK_S

    def pss_bytes(self) -> int:
        """Return its proportional set size: a page that n processes map counts one nth in each."""
        return self.memory()["Pss"]

    def memory(self) -> dict[str, int]:
        """Return the sums of its mappings, bytes by the name that the system gives."""
        text = Path(f"/proc/{self.popen.pid}/smaps_rollup").read_text()
        found = {n: int(kib) * 1024 for n, kib in re.findall(r"^(\w+):\s+(\d+) kB", text, re.M)}
        status = Path(f"/proc/{self.popen.pid}/status").read_text()
        found |= {"Rss_Shmem": int(re.search(r"RssShmem:\s+(\d+)", status)[1]) * 1024}  # type: ignore[index]
        return found

    def has_answered(self, timeout_s: float) -> bool:
        """Return whether it has said something, after a time at most."""
        return bool(select.select([self.popen.stdout], [], [], timeout_s)[0])


@contextmanager
def started(role: str, name: str, *arguments: str) -> Iterator[Process]:
    """Start a process; it ends with the context."""
    command = [sys.executable, __file__, role, *arguments]
    pipe = subprocess.PIPE
    process = Process(name, subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))
    try:
        yield process
        if process.popen.poll() is None:
            process.order({"end": True})
            process.popen.wait(30)
    finally:
        process.popen.kill()
        process.popen.wait(30)


@contextmanager
def serving_base(directory: Path, threads: int, *options: str) -> Iterator[tuple[Process, str]]:
    """Start `pcg serve-base`; yields it and its address."""
    command = [sys.executable, "-m", "pcg_cli", "serve-base", str(directory), "--api-key", KEY]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    pipe = subprocess.PIPE
    popen = subprocess.Popen([*command, *options], stderr=pipe, text=True, env=environment)
    assert popen.stderr is not None
    try:
        where = None
        for line in popen.stderr:
            found = re.search(r"^listening at (\S+)", line)
            if found:
                where = found[1]
                break
        if where is None:
            raise SystemExit(f"error: the base ended with {popen.wait()}")
        reader = threading.Thread(target=lambda: list(popen.stderr or ()), daemon=True)
        reader.start()
        yield Process("base", popen), where
    finally:
        popen.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        popen.kill()
        popen.wait(30)


class Memory:
    """Samples the memory of processes while a context lasts.

    Attributes:
        most: the largest sum of their proportional set sizes, bytes.
        most_of: the largest of each process, by name.
    """

    def __init__(self, processes: Sequence[Process]) -> None:
        self._processes = processes
        self._is_over = threading.Event()
        self.most = 0
        self.most_of = {one.name: 0 for one in processes}

    def __enter__(self) -> Memory:
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._is_over.wait(0.1):
            sizes = {one.name: one.pss_bytes() for one in self._processes}
            self.most = max(self.most, sum(sizes.values()))
            for name, size in sizes.items():
                self.most_of[name] = max(self.most_of[name], size)

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()


def main() -> None:
    """Take a role: its name, the model, and the rest in JSON."""
    role, directory, rest = sys.argv[1:]
    given = json.loads(rest)
    work = Work(**given.pop("work"))
    {"client": client, "peer": peer, "whole": whole}[role](directory, work=work, **given)


if __name__ == "__main__":
    main()
