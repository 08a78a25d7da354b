"""Soak `pcg serve` with four tenants, one of them hostile, and compare the others without it.

    python benchmarks/soak_server.py [--minutes 10] [--segment 20] [--only ATTACK] [--model PATH]

Three tenants stream completions on a fixed schedule, over the base and greedy. Segments with the
hostile tenant and segments without it take turns at one server, which runs its engine in a process
of its own. In a segment without it, a process burns as much processor time as the hostile client
burned in the segment before, so that both have as much of the machine. What the hostile tenant does
is in `ATTACKS`: bad fields, floods, prompts of thousands of tokens, bodies of a million elements,
streams that it leaves, adapters with NaN, with a scale of 1e300 and DoRA, of ranks up to 2,000, and
more of them than `--max-cpu-loras`, and jobs that diverge or have bad data.

Reported are the others' gaps between tokens with it in gaps without it, mean and percentiles, by
the clock of a client in another process, and by the processor time of the engine's thread between
two tokens; whether their texts are the same; and what the attacks were answered. `soak_tenants.py`
compares settings of the engine alone.

The model is that of `bench_http.py` unless one is given, on one thread.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import hashlib
import itertools
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

import httpx
from bench_http import MODEL, cpu_s, save_model, started_by
from measure import write
from soak_tenants import EVERY_S, NEW, TENANTS, Gap, of_gaps, ratios

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support.hostile import bad_fields, large_bodies, write_adapters

CONTEXT = get_context("spawn")
HOSTILE = "hostile"
URL = "/v1/completions"
JSON = {"content-type": "application/json"}
Answers: TypeAlias = Counter[str]
_PERF_EVENT_OPEN = {"x86_64": 298, "aarch64": 241}[os.uname().machine]
"""The number of the system call."""

# ----------------------------------------------------------------------------- the server


@contextmanager
def server(model: Path, folder: Path) -> Iterator[tuple[str, int]]:
    """Run `pcg serve` with a key for each tenant; gives its address and process id."""
    keys = [
        {"name": name, "sha256": hashlib.sha256(_key(name).encode()).hexdigest(), "scopes": scopes}
        for name in (*TENANTS, HOSTILE)
        for scopes in [["infer", "train"]]
    ]
    (folder / "keys.json").write_text(json.dumps(keys))
    command = [sys.executable, "-m", "pcg_cli", "serve", str(model), "--port", "0"]
    command += ["--api-keys", str(folder / "keys.json"), "--served-model-name", MODEL]
    command += ["--lora-roots", str(folder / "adapters"), "--max-cpu-loras", "8"]
    command += ["--data-dir", str(folder / "data"), "--access-log", "none", "--dtype", "float32"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "errors.txt").open("w+") as said:
        process = subprocess.Popen(command, stderr=said, env=environment)
        try:
            while (found := re.search(r"at (http://\S+)", _text(said.name))) is None:
                if process.poll() is not None:
                    raise SystemExit(f"error: the server did not start\n{_text(said.name)}")
                time.sleep(0.2)
            yield found[1], process.pid
            if process.poll() is not None:
                raise SystemExit(f"error: the server ended\n{_text(said.name)[-2000:]}")
        finally:
            process.terminate()
            process.wait(60)


def _text(path: str) -> str:
    return Path(path).read_text()


def _key(name: str) -> str:
    return f"key-of-{name}"


def engine_clock(pid: int, url: str) -> Callable[[], float]:
    """Return a clock of the processor time of the engine's thread, the busiest one, seconds."""
    tasks = [task for one in started_by(pid) for task in Path(f"/proc/{one}/task").iterdir()]

    def spent_s(task: Path) -> float:
        return int((task / "schedstat").read_text().split()[0]) / 1e9

    before = {task: spent_s(task) for task in tasks}

    def used_s(task: Path) -> float:
        return spent_s(task) - before[task]

    body = {"model": MODEL, "prompt": [5] * 8, "max_tokens": 32, "ignore_eos": True}
    headers = {"authorization": f"Bearer {_key(TENANTS[0])}"}
    httpx.post(f"{url}{URL}", json=body, headers=headers, timeout=60).raise_for_status()
    return task_clock(int(max(tasks, key=used_s).name))


def task_clock(thread: int) -> Callable[[], float]:
    """Return a clock of the processor time of a thread of another process, in seconds.

    /proc tells that of a running thread as it was at the last tick, which is every 4 ms.
    """
    fields = struct.pack("IIQQQQQ", 1, 64, 1, 0, 0, 0, 0)  # a task clock, which software counts
    libc = ctypes.CDLL(None, use_errno=True)
    opened = libc.syscall(_PERF_EVENT_OPEN, fields.ljust(64, b"\0"), thread, -1, -1, 0)
    if opened < 0:
        raise SystemExit(f"error: perf_event_open: {os.strerror(ctypes.get_errno())}; run as root")
    return lambda: int.from_bytes(os.read(opened, 8), sys.byteorder) / 1e9


# ----------------------------------------------------------------------------- the other tenants


async def segment(
    url: str, seconds: float, clock: Callable[[], float]
) -> tuple[list[str], list[Gap]]:
    """Run the schedule of the three tenants; returns their texts, and the gaps between tokens."""
    drawn = Random(0)
    gaps: list[Gap] = []

    async def stream(client: httpx.AsyncClient, tenant: str, prompt: list[int], due: float) -> str:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        body = {"model": MODEL, "prompt": prompt, "max_tokens": NEW, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True}
        text, times = "", []
        headers = {"authorization": f"Bearer {_key(tenant)}"}
        async with client.stream("POST", URL, json=body, headers=headers) as reply:
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    times.append((time.perf_counter(), clock()))
                    event = json.loads(line[6:])
                    text += event["choices"][0]["text"] if "choices" in event else line
        gaps.extend((b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(times))
        return text

    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        began = time.perf_counter()
        streams = []
        for turn in range(int(seconds / EVERY_S) * len(TENANTS)):
            prompt = [drawn.randrange(5, 3000) for _ in range(drawn.randrange(8, 48))]
            due = began + turn * EVERY_S / len(TENANTS)
            streams.append(stream(client, TENANTS[turn % len(TENANTS)], prompt, due))
        return list(await asyncio.gather(*streams)), gaps


# ----------------------------------------------------------------------------- the hostile tenant


class Hostile:
    """The attacks of a tenant over HTTP; each notes how it was answered."""

    def __init__(self, client: httpx.AsyncClient, answers: Answers, positions: int) -> None:
        self.client = client
        self.answers = answers
        self.positions = positions
        self.bodies = large_bodies(MODEL)
        self.turn = 0

    async def post(self, body: dict[str, Any] | bytes, url: str = URL) -> None:
        """Send a body, and note the status."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        try:
            reply = await self.client.post(url, content=content, headers=JSON)
            self.answers[str(reply.status_code)] += 1
        except httpx.HTTPError as error:
            self.answers[type(error).__name__] += 1

    async def ask(self, model: str = MODEL, length: int = 8, new: int = 16, seed: int = 0) -> None:
        prompt = [5 + (seed + place) % 3000 for place in range(length)]
        await self.post({"model": model, "prompt": prompt, "max_tokens": new, "ignore_eos": True})

    async def fields(self) -> None:
        await asyncio.gather(*map(self.post, bad_fields(MODEL)))

    async def flood(self) -> None:
        await asyncio.gather(*(self.ask(seed=place) for place in range(300)))

    async def long_prompts(self) -> None:
        lengths = (self.positions - 20, self.positions // 2, self.positions + 1, 100_000)
        self.turn += 1
        await asyncio.gather(*(self.ask(length=one, seed=7 * self.turn) for one in lengths))

    async def large(self) -> None:
        for body in self.bodies:
            await self.post(body)

    async def leaves(self) -> None:
        body = {"model": MODEL, "prompt": [7] * 30, "max_tokens": 500, "stream": True}
        for _ in range(20):
            async with self.client.stream("POST", URL, json=body):
                pass

    async def poisoned(self) -> None:
        await asyncio.gather(*(self.ask(name) for name in ("alpha", "alpha", "nan", MODEL)))

    async def ranks(self) -> None:
        await asyncio.gather(*(self.ask(f"rank-{rank}") for rank in (256, 1000, 2000)))

    async def many_adapters(self) -> None:
        await asyncio.gather(*(self.ask(f"small-{place}") for place in range(16)))

    async def jobs(self) -> None:
        rows = [json.dumps({"prompt": "word5 word6", "completion": " word7"})] * 12
        for content in ("\n".join(rows), '{"text": "a"}\n{"text": 5', "[" * 10_000):
            files = {"file": ("data.jsonl", content.encode())}
            made = await self.client.post("/v1/files", data={"purpose": "fine-tune"}, files=files)
            self.answers[str(made.status_code)] += 1
            if made.is_success:
                body = {"model": MODEL, "training_file": made.json()["id"]}
                given = {"batch_size": 4, "n_epochs": 1, "learning_rate_multiplier": 1e30}
                await self.post(body | {"hyperparameters": given}, "/v1/fine_tuning/jobs")


ATTACKS = ("fields", "flood", "long_prompts", "large", "leaves", "poisoned", "ranks",
           "many_adapters", "jobs")  # fmt: skip


def attack(pipe: Connection, url: str, names: Sequence[str], positions: int, stop: Event) -> None:
    """Attack whenever the pipe says so, until `stop`; answers how often, and the replies."""

    async def run() -> tuple[dict[str, int], Answers]:
        counts: dict[str, int] = {}
        answers: Answers = Counter()
        headers = {"authorization": f"Bearer {_key(HOSTILE)}"}
        limits = httpx.Limits(max_connections=1000)
        async with httpx.AsyncClient(
            base_url=url, headers=headers, timeout=60, limits=limits
        ) as client:
            hostile = Hostile(client, answers, positions)
            for name in itertools.cycle(names):
                act: Callable[[], Awaitable[None]] = getattr(hostile, name)
                with suppress(httpx.HTTPError, asyncio.TimeoutError):
                    counts[name] = counts.get(name, 0) + 1
                    await asyncio.wait_for(act(), 20)
                if stop.is_set():
                    return counts, answers
        raise AssertionError

    pipe.send("ready")
    while pipe.recv() is not None:
        began = time.process_time()
        pipe.send((*asyncio.run(run()), time.process_time() - began))


def burn(pipe: Connection) -> None:
    """Burn processor time, so much of each second as the pipe says, until it says the next."""
    pipe.send("ready")
    share: float | None = 0.0
    while share is not None:
        began = time.process_time()
        while time.process_time() - began < 0.02 * share:
            pass
        waits_s = 0.02 * (1 - share)
        if pipe.poll(max(waits_s, 0.0)):
            share = pipe.recv()


# ----------------------------------------------------------------------------- rounds


def soak(model: Path, seconds: float, length_s: float, names: Sequence[str]) -> dict[str, Any]:
    """Run segments with and without the hostile tenant in turn; returns how they compare."""
    config = json.loads((model / "config.json").read_text())
    heads, size = config["num_attention_heads"], config["hidden_size"]
    head = config.get("head_dim") or size // heads
    shapes = {"q_proj": (heads * head, size), "o_proj": (size, heads * head)}
    gaps: dict[str, list[Gap]] = {"without": [], "with": []}
    counts: Counter[str] = Counter()
    answers: Answers = Counter()
    share, same = 0.0, True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_adapters(folder / "adapters", shapes, config["num_hidden_layers"])
        stop = CONTEXT.Event()
        with server(model, folder) as (url, pid):
            positions = min(config["max_position_embeddings"], 5000)
            with (
                _process(attack, url, names, positions, stop) as hostile,
                _process(burn) as burner,
            ):
                clock = engine_clock(pid, url)
                expected, _ = asyncio.run(segment(url, length_s, clock))  # warms up, too
                for round_ in range(max(1, round(seconds / 2 / length_s))):
                    stop.clear()
                    hostile.send("go")
                    began, before_s = time.perf_counter(), cpu_s(pid)
                    found, some = asyncio.run(segment(url, length_s, clock))
                    of_server_s = cpu_s(pid) - before_s
                    took_s = time.perf_counter() - began
                    stop.set()
                    counted, answered, burned_s = hostile.recv()
                    counts.update(counted)
                    answers.update(answered)
                    print(f"  round {round_}: {counted} {dict(answered)}", file=sys.stderr)
                    gaps["with"] += some
                    same &= found == expected
                    # The server's own process works for the hostile tenant, too, but for its share.
                    share = min(1.0, (burned_s + of_server_s) / took_s)
                    asyncio.run(segment(url, EVERY_S, clock))
                    burner.send(share)
                    found, some = asyncio.run(segment(url, length_s, clock))
                    burner.send(0.0)
                    gaps["without"] += some
                    same &= found == expected
    wall, processor = (
        {key: of_gaps([gap[place] for gap in some]) for key, some in gaps.items()}
        for place in (0, 1)
    )
    return {
        "minutes": round(seconds / 60, 2),
        "tokens_equal": same,
        "gaps_ms": wall,
        "ratio": ratios(wall),
        "gaps_processor_ms": processor,
        "ratio_processor": ratios(processor),
        "burned_share": round(share, 2),
        "attacks": dict(counts),
        "answers": dict(answers),
    }


@contextmanager
def _process(target: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """Run a function in a process; gives the pipe to it."""
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    ours.recv()
    try:
        yield ours
    finally:
        process.terminate()
        process.join(30)


def main() -> None:
    """Soak, and write what it gave."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--segment", type=float, default=20.0, help="seconds of a segment")
    parser.add_argument("--only", choices=ATTACKS, help="one attack alone; nothing is written then")
    parser.add_argument("--model", type=Path, help="a folder in place of the random model")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or Path(folder)
        if arguments.model is None:
            save_model(model)
        names = ATTACKS if arguments.only is None else (arguments.only,)
        found = soak(model, 60 * arguments.minutes, arguments.segment, names)
    if arguments.only is None:
        write("soak_server", found)
    else:
        print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
