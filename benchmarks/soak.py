"""Soak an engine and `pcg serve` with four tenants, one of them hostile, and compare without it.

Three tenants send requests on a fixed schedule. Segments of time with the hostile tenant and
without it take turns. Reported are the gaps between the tokens of the three with it, relative to
those without it, as mean and percentiles: by the clock, and by processor time of the engine's
thread, which does not count what else the machine runs; and whether their tokens are the same. The
model is a random 8-layer Llama of hidden size 512, on one thread in fp32.

tenants         an engine on its thread with `pcg.Limits()`: the hostile tenant's requests make
                steps 1.1 times as long beside others, and its jobs have a tenth of the time. It
                sends bad fields, floods of 1,000 requests, prompts as long as the model takes,
                adapters with NaN and adapters that are removed in use, jobs that diverge or have
                bad data, cancelled streams, and listeners that raise.
soak_server     `pcg serve`, whose engine has a process; the three ask the base, greedily. In a
                segment without the hostile tenant a process burns as much processor time as its
                client burned in the segment before. It sends bad fields, floods, prompts of
                thousands of tokens, bodies of a million elements, streams that it leaves, adapters
                with NaN, with a scale of 1e300 and DoRA, of ranks up to 2,000, and more of them
                than `--max-cpu-loras`, and jobs that diverge or have bad data.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import hashlib
import itertools
import json
import math
import os
import random
import resource
import statistics
import struct
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.synchronize import Event as Stop
from pathlib import Path
from typing import Any

import harness as bench
import httpx

import pcg
from pcg.errors import EngineError, PcgError
from pcg.runtime.data.example import Example
from pcg.runtime.metrics.events import Event, EventLog, Kind

sys.path.insert(0, str(bench.ROOT))
from tests.support.hostile import bad_fields, large_bodies, write_adapters

Gap = tuple[float, float]
"""Seconds, and those of the engine's thread on a processor."""
TENANTS, HOSTILE = ("a", "b", "c"), "hostile"
EVERY_S, NEW = 1.0, 24
"""Seconds between two requests of a tenant, and tokens of each."""
LORA: dict[str, Any] = {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj", "v_proj"]}
JOB: dict[str, Any] = {"peft": LORA, "batch_size": 1, "max_length": 32, "learning_rate": 1e30}
RATIO = " (at most 1.3)", " (at most 1.2)"


def compared(gaps: dict[str, list[Gap]], bound: str) -> dict[str, Any]:
    """Return statistics of gaps in milliseconds, and by how much they are longer with it."""
    found: dict[str, Any] = {}
    for place, clock in enumerate(("", "_processor")):
        ms = {name: of_gaps([gap[place] for gap in some]) for name, some in gaps.items()}
        ratios = {
            name + bound * (name in ("mean", "p99") and bool(place)): round(
                ms["with"][name] / ms["without"][name], 2
            )
            for name in ("mean", "p50", "p90", "p99")
        }
        found |= {f"gaps{clock}_ms": ms, f"ratio{clock}": ratios}
    return found


def of_gaps(gaps: Sequence[float]) -> dict[str, float]:
    cuts = statistics.quantiles(gaps, n=100)
    found = {"mean": statistics.fmean(gaps), "p50": cuts[49], "p90": cuts[89], "p99": cuts[98]}
    return {name: round(1000 * value, 1) for name, value in found.items()} | {"count": len(gaps)}


def schedule(seconds: float, vocabulary: int) -> Iterator[tuple[int, str, list[int], float]]:
    """Yield the turn, tenant, prompt and second of each request of a segment."""
    drawn = random.Random(0)
    for turn in range(int(seconds / EVERY_S) * len(TENANTS)):
        prompt = [drawn.randrange(5, vocabulary) for _ in range(drawn.randrange(8, 48))]
        yield turn, TENANTS[turn % len(TENANTS)], prompt, turn * EVERY_S / len(TENANTS)


# -------------------------------------------------------------------------------------- an engine


class HostileTenant:
    """The attacks of a tenant on an engine, one after the other, until it is stopped."""

    def __init__(self, executor: Any, running: Any, directory: Path) -> None:
        self.executor, self.running, self.directory = executor, running, directory
        self.drawn = random.Random(1)
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.jobs: list[Any] = []
        self._names = itertools.count()
        self._stop = threading.Event()

    def submit(self, prompt: Any, adapter: Any = None, **fields: Any) -> Any:
        given = {"tenant": HOSTILE, "max_new_tokens": 16} | fields
        return self.running.submit(prompt, adapter, **given)

    def bad_fields(self) -> None:
        bad: list[dict[str, Any]] = [
            {"temperature": math.nan}, {"top_k": -1}, {"logprobs": 10**6}, {"tenant": []},
            {"priority": 10**400}, {"timeout_s": 10**400}, {"stop": "\ud800" * 3}, {"n": 10**9},
            {"logit_bias": {10**9: 1}}, {"seed": {}}, {"request_id": "same"}, {"timeout_s": 1e-9},
            {"bad_words": [[i] for i in range(1024)]}, {"tpot_slo_s": 1e-300}, {"n": 100},
        ]  # fmt: skip
        for fields in bad:
            self.attempt(lambda fields=fields: self.submit([1, 2, 3], **fields))
        for prompt in ([bench.VOCABULARY], [-1], [1.5], [10**5000], [], None, {"a": 1}):
            self.attempt(lambda prompt=prompt: self.submit(prompt))

    def flood(self) -> None:
        for turn in range(1000):
            self.attempt(lambda: self.submit([self.drawn.randrange(bench.VOCABULARY)] * 8))
            if turn % 4 == 0:
                time.sleep(1e-3)  # the client's own time would hold the interpreter's lock

    def huge_prompts(self) -> None:
        for length in (2000, 2048, 100_000):
            self.attempt(lambda length=length: self.submit([5] * length))

    def cancelled(self) -> None:
        for _ in range(20):
            self.attempt(lambda: self.submit([7] * 30, max_new_tokens=500).cancel())

    def nan_adapter(self) -> None:
        self.attempt(self.running.add_adapter(self.name(), self.directory / "nan").result)

    def removed_adapter(self) -> None:
        name = self.name()
        self.attempt(self.running.add_adapter(name, LORA).result)
        for _ in range(3):
            self.attempt(lambda: self.submit([9] * 20, name))
        self.attempt(lambda: self.executor.remove_adapter(name))

    def diverging_job(self) -> None:
        rows = [{"input_ids": [self.drawn.randrange(bench.VOCABULARY) for _ in range(32)]}] * 4
        examples = [Example([1, 2, 3] * 8, [1, 2, 3] * 8)] * 4
        for data in ([rows], examples):
            self.jobs.append(self.running.finetune(data, self.name(), max_steps=5, **JOB))

    def bad_data(self) -> None:
        def wait(data: Any) -> None:
            self.running.finetune(data, self.name(), max_steps=1, **JOB).wait(5)

        for path in (self.directory / "bad.jsonl", self.directory / "none.jsonl", "\0", 5):
            self.attempt(lambda path=path: wait(path))

    def listener(self) -> None:
        def raises(event: Event) -> None:
            raise ValueError("no")

        self.running.engine.log.listen(raises)

    ATTACKS = (
        bad_fields, flood, huge_prompts, cancelled, nan_adapter, removed_adapter, diverging_job,
        bad_data, listener,
    )  # fmt: skip

    def name(self) -> str:
        return f"hostile-{next(self._names)}"

    def attempt(self, act: Callable[[], object]) -> None:
        """Do something that may be refused, and note every error that is not a PcgError."""
        if self._stop.is_set():
            return
        try:
            act()
        except EngineError as error:
            self.wrong.append(repr(error))
        except PcgError:
            self.counts["refused"] += 1
        except Exception as error:
            self.wrong.append(repr(error))

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Attack on a thread of its own meanwhile, then end what is left of it."""
        self._stop.clear()
        thread = threading.Thread(target=self._attack, name=HOSTILE)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()
        engine = self.running.engine
        everyone = engine.scheduler.everyone

        def end() -> None:
            for one in [x for x in everyone if x.request.tenant not in TENANTS and not x.choice]:
                engine.cancel(one.id)

        self.running.run(end)
        for job in self.jobs:
            job.cancel()
        self.jobs.clear()

    def _attack(self) -> None:
        for attack in itertools.cycle(self.ATTACKS):
            if self._stop.wait(0.2):
                return
            self.counts[attack.__name__] += 1
            attack(self)


def write_bad_files(executor: Any, directory: Path) -> None:
    """Write an adapter with NaN, and data that is none."""
    for tensor in executor.add_adapter("nan", LORA).tensors:
        tensor.fill_(math.nan)
    executor.save_adapter("nan", directory / "nan")
    executor.remove_adapter("nan")
    (directory / "bad.jsonl").write_bytes(b'{"text": "a"}\n{"text": 5\xff\n' + b"[" * 10_000)


def segment(running: Any, seconds: float) -> tuple[list[tuple[int, ...]], list[Gap]]:
    """Run the schedule of the three tenants; return their tokens, and the gaps between these."""
    times: dict[str, list[Gap]] = {}

    def listen(event: Event) -> None:
        if event.kind is Kind.TOKEN and event.subject in times:
            times[event.subject].append((event.time_s, time.thread_time()))

    end = running.engine.log.listen(listen)
    streams, began = [], time.perf_counter()
    for turn, tenant, prompt, due_s in schedule(seconds, bench.VOCABULARY):
        time.sleep(max(0.0, began + due_s - time.perf_counter()))
        name = f"{tenant} {time.monotonic_ns()}"
        times[name] = []
        fields: Any = {"temperature": 1.0, "seed": turn} if turn % 2 else {}
        fields |= {"request_id": name, "max_new_tokens": NEW, "ignore_eos": True}
        adapter = None if tenant == "a" else tenant
        streams.append(running.submit(prompt, adapter, tenant=tenant, **fields))
    tokens = [stream.wait(300).token_ids for stream in streams]
    end()
    pairs = [pair for one in times.values() for pair in itertools.pairwise(one)]
    return tokens, [(b[0] - a[0], b[1] - a[1]) for a, b in pairs]


@bench.case("tenants", minutes=0.1, length_s=2.0)
def tenants(minutes: float = 4.0, length_s: float = 20.0) -> dict[str, Any]:
    executor = pcg.compile(bench.random_llama())
    for seed, name in enumerate(TENANTS[1:]):
        executor.add_adapter(name, LORA, seed=seed)
    gc.collect()
    gc.freeze()  # as the server does
    rounds = max(1, round(30 * minutes / length_s))
    gaps: dict[str, list[Gap]] = {"without": [], "with": []}
    memory, same = [], True
    engine = executor.engine(kv_cache_bytes=2**29, log=EventLog(10_000))
    with tempfile.TemporaryDirectory() as folder, engine.start() as running:
        write_bad_files(executor, Path(folder))
        hostile = HostileTenant(executor, running, Path(folder))
        expected, _ = segment(running, length_s)  # warms up, too
        for _ in range(rounds):
            for name in gaps:
                with hostile.beside() if name == "with" else contextlib.nullcontext():
                    found, some = segment(running, length_s)
                same &= found == expected
                gaps[name] += some
            gc.collect()
            memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
        same &= segment(running, length_s)[0] == expected
        running.run(running.engine.check_integrity)
    default = {
        "minutes": round(2 * rounds * length_s / 60, 2),
        "tokens_equal": same,
        "requests_compared": len(expected) * (2 * rounds + 1),
        **compared(gaps, RATIO[0]),
        "attacks": dict(hostile.counts),
        "other_errors": hostile.wrong[:5],
        "peak_rss_mib_by_round": memory,
    }
    return {"default": default}


# -------------------------------------------------------------------------------------- a server

URL = "/v1/completions"
_PERF_EVENT_OPEN = {"x86_64": 298, "aarch64": 241}[os.uname().machine]
"""The number of the system call."""


def key_of(name: str) -> str:
    return f"key-of-{name}"


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key_of(name)}"}


@contextlib.contextmanager
def tenants_server(model: Path, folder: Path) -> Iterator[tuple[str, int]]:
    """Run `pcg serve` with a key for each tenant; gives its address and process id."""
    digests = {name: hashlib.sha256(key_of(name).encode()) for name in (*TENANTS, HOSTILE)}
    keys = [
        {"name": name, "sha256": digest.hexdigest(), "scopes": ["infer", "train"]}
        for name, digest in digests.items()
    ]
    (folder / "keys.json").write_text(json.dumps(keys))
    options = ["--api-keys", folder / "keys.json", "--lora-roots", folder / "adapters"]
    options += ["--max-cpu-loras", 8, "--data-dir", folder / "data", "--access-log", "none"]
    with bench.server(model, *options) as (port, pid):
        yield f"http://127.0.0.1:{port}", pid


def engine_clock(pid: int, url: str) -> Callable[[], float]:
    """Return a clock of the processor time of the engine's thread, the busiest one, seconds.

    /proc tells that of a running thread as it was at the last tick, which is every 4 ms.
    """
    tasks = [t for one in bench.children(pid) for t in Path(f"/proc/{one}/task").iterdir()]

    def spent_s(task: Path) -> float:
        return int((task / "schedstat").read_text().split()[0]) / 1e9

    before = {task: spent_s(task) for task in tasks}
    body = {"model": "model", "prompt": [5] * 8, "max_tokens": 32, "ignore_eos": True}
    httpx.post(f"{url}{URL}", json=body, headers=bearer("a"), timeout=60).raise_for_status()
    busiest = max(tasks, key=lambda task: spent_s(task) - before[task])
    fields = struct.pack("IIQQQQQ", 1, 64, 1, 0, 0, 0, 0)  # a task clock, which software counts
    libc = ctypes.CDLL(None, use_errno=True)
    opened = libc.syscall(_PERF_EVENT_OPEN, fields.ljust(64, b"\0"), int(busiest.name), -1, -1, 0)
    if opened < 0:
        raise SystemExit(f"error: perf_event_open: {os.strerror(ctypes.get_errno())}; run as root")
    return lambda: int.from_bytes(os.read(opened, 8), sys.byteorder) / 1e9


async def http_segment(
    url: str, seconds: float, clock: Callable[[], float]
) -> tuple[list[str], list[Gap]]:
    """Run the schedule of the three tenants; return their texts, and the gaps between tokens."""
    gaps: list[Gap] = []

    async def stream(client: httpx.AsyncClient, tenant: str, prompt: list[int], due: float) -> str:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        body = {"model": "model", "prompt": prompt, "max_tokens": NEW, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True}
        text, times = "", []
        async with client.stream("POST", URL, json=body, headers=bearer(tenant)) as reply:
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    times.append((time.perf_counter(), clock()))
                    event = json.loads(line[6:])
                    text += event["choices"][0]["text"] if "choices" in event else line
        gaps.extend((b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(times))
        return text

    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        began = time.perf_counter()
        streams = [
            stream(client, tenant, prompt, began + due_s)
            for _, tenant, prompt, due_s in schedule(seconds, 3000)
        ]
        return list(await asyncio.gather(*streams)), gaps


class HostileClient:
    """The attacks of a tenant over HTTP; each notes how it was answered."""

    def __init__(self, client: httpx.AsyncClient, positions: int) -> None:
        self.client, self.positions = client, positions
        self.answers: Counter[str] = Counter()
        self.bodies = large_bodies("model")
        self.turn = 0

    async def post(self, body: dict[str, Any] | bytes, url: str = URL) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        kind = {"content-type": "application/json"}
        try:
            reply = await self.client.post(url, content=content, headers=kind)
            self.answers[str(reply.status_code)] += 1
        except httpx.HTTPError as error:
            self.answers[type(error).__name__] += 1

    async def ask(self, model: str = "model", length: int = 8, seed: int = 0) -> None:
        prompt = [5 + (seed + place) % 3000 for place in range(length)]
        await self.post({"model": model, "prompt": prompt, "max_tokens": 16, "ignore_eos": True})

    async def fields(self) -> None:
        await asyncio.gather(*map(self.post, bad_fields("model")))

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
        body = {"model": "model", "prompt": [7] * 30, "max_tokens": 500, "stream": True}
        for _ in range(20):
            async with self.client.stream("POST", URL, json=body):
                pass

    async def poisoned(self) -> None:
        await asyncio.gather(*(self.ask(name) for name in ("alpha", "alpha", "nan", "model")))

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
                body = {"model": "model", "training_file": made.json()["id"]}
                given = {"batch_size": 4, "n_epochs": 1, "learning_rate_multiplier": 1e30}
                await self.post(body | {"hyperparameters": given}, "/v1/fine_tuning/jobs")

    ATTACKS = (
        fields, flood, long_prompts, large, leaves, poisoned, ranks, many_adapters, jobs,
    )  # fmt: skip


def attack(pipe: Any, url: str, positions: int, stop: Stop) -> None:
    """Attack whenever the pipe says so, until `stop`; answer how often, and the replies."""

    async def run() -> tuple[Counter[str], Counter[str]]:
        counts: Counter[str] = Counter()
        limits = httpx.Limits(max_connections=1000)
        async with httpx.AsyncClient(
            base_url=url, headers=bearer(HOSTILE), timeout=60, limits=limits
        ) as client:
            hostile = HostileClient(client, positions)
            for act in itertools.cycle(hostile.ATTACKS):
                counts[act.__name__] += 1
                with contextlib.suppress(httpx.HTTPError, asyncio.TimeoutError):
                    await asyncio.wait_for(act(hostile), 20)
                if stop.is_set():
                    break
            return counts, hostile.answers

    while pipe.recv() is not None:
        began = time.process_time()
        pipe.send((*asyncio.run(run()), time.process_time() - began))


def burn(pipe: Any) -> None:
    """Burn processor time, so much of each second as the pipe says, until it says the next."""
    share: float | None = 0.0
    while share is not None:
        began = time.process_time()
        while time.process_time() - began < 0.02 * share:
            pass
        if pipe.poll(max(0.02 * (1 - share), 0.0)):
            share = pipe.recv()


@bench.case("soak_server", minutes=0.1, length_s=2.0)
def soak_server(minutes: float = 4.0, length_s: float = 20.0) -> dict[str, Any]:
    gaps: dict[str, list[Gap]] = {"without": [], "with": []}
    counts, answers, share, same = Counter[str](), Counter[str](), 0.0, True
    stop = bench.CONTEXT.Event()
    with bench.saved() as model, tempfile.TemporaryDirectory() as name:
        folder, config = Path(name), json.loads((model / "config.json").read_text())
        size, layers = config["hidden_size"], config["num_hidden_layers"]
        shapes = {"q_proj": (size, size), "o_proj": (size, size)}
        write_adapters(folder / "adapters", shapes, layers)
        positions = config["max_position_embeddings"]
        with (
            tenants_server(model, folder) as (url, pid),
            bench.started(attack, url, positions, stop) as hostile,
            bench.started(burn) as burner,
        ):
            clock = engine_clock(pid, url)
            expected, _ = asyncio.run(http_segment(url, length_s, clock))  # warms up, too
            for round_ in range(max(1, round(30 * minutes / length_s))):
                stop.clear()
                hostile.pipe.send("go")
                began, before_s = time.perf_counter(), bench.cpu_s(pid)
                found, some = asyncio.run(http_segment(url, length_s, clock))
                of_server_s, took_s = bench.cpu_s(pid) - before_s, time.perf_counter() - began
                stop.set()
                counted, answered, burned_s = hostile.answer()
                counts.update(counted)
                answers.update(answered)
                bench.note(f"round {round_}: {dict(counted)} {dict(answered)}")
                gaps["with"] += some
                same &= found == expected
                # The server's own process works for the hostile tenant, too, but for its share.
                share = min(1.0, (burned_s + of_server_s) / took_s)
                asyncio.run(http_segment(url, EVERY_S, clock))
                burner.pipe.send(share)
                found, some = asyncio.run(http_segment(url, length_s, clock))
                burner.pipe.send(0.0)
                gaps["without"] += some
                same &= found == expected
    return {
        "minutes": minutes,
        "tokens_equal": same,
        **compared(gaps, RATIO[1]),
        "burned_share": round(share, 2),
        "attacks": dict(counts),
        "answers": dict(answers),
    }


if __name__ == "__main__":
    bench.main()
