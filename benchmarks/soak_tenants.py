"""Soak an engine with four tenants, one of them hostile, and compare the others without it.

    python benchmarks/soak_tenants.py [--minutes 10] [--segment 20] [--settings …] [--each]

Settings that are not asked for keep their place in the result file. With --each every attack goes
on by itself, too, and the result has by how much the gaps are longer beside it.

Three tenants send requests on a fixed schedule, to the base and to adapters. Segments of time with
the hostile tenant and without it take turns, in one engine on its thread, so that what else the
machine does falls on both alike. The hostile tenant does in turn what `ATTACKS` has: bad fields,
floods of 1,000 requests, prompts as long as the model takes, adapters with NaN, adapters that are
removed in use, jobs that diverge or have bad data, cancelled streams, and listeners that raise.

    default     `pcg.Limits()`: the hostile tenant's requests make steps 1.1 times as long beside
                others, and its jobs have a tenth of the time
    strict      FairShare(stretch=1.05), and jobs have the time in which nobody is served,
                Limits(finetuning_floor=0)
    promised    FairShare(stretch=1.05), and Limits(tpot_slo_s=…) of 1.2 times the median gap
                without the hostile tenant, which is measured first

In both of the latter a step without the three lasts at most 50 ms, `Limits(idle_step_s=…)`.

Gaps are those between a request's tokens, by the events of the engine: in seconds, and in processor
time of the engine's thread, which does not count what else the machine runs. The model is that of
`bench_generation.py`, on one thread in fp32.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import math
import random
import resource
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from bench_generation import random_llama
from measure import RESULTS, write

import pcg
from pcg.errors import EngineError, PcgError
from pcg.runtime.admission.fair_share import FairShare
from pcg.runtime.data.example import Example
from pcg.runtime.engine.async_engine import AsyncEngine
from pcg.runtime.engine.running_job import RunningJob
from pcg.runtime.executor import Executor
from pcg.runtime.metrics.events import Event, EventLog, Kind

Gap: TypeAlias = tuple[float, float]
"""Seconds, and those of the engine's thread on a processor."""
TENANTS = ("a", "b", "c")
EVERY_S = 1.0
"""Seconds between two requests of a tenant."""
NEW = 24
VOCABULARY = 32000
LORA: dict[str, Any] = {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj", "v_proj"]}
JOB: dict[str, Any] = {"peft": LORA, "batch_size": 1, "max_length": 32, "learning_rate": 1e30}
SETTINGS = ("promised", "strict", "default")
STRETCH, PROMISE = 1.05, 1.2
NEWCOMER_S = 0.05
"""The longest step of the hostile tenant alone: a newcomer that waits long meets the next one."""


def engine_of(executor: Executor, setting: str) -> AsyncEngine:
    """Return a running engine with some setting."""
    options: dict[str, Any] = {"kv_cache_bytes": 2**29, "log": EventLog(10_000)}
    if setting == "default":
        return executor.engine(**options).start()
    options["policy"] = FairShare(stretch=STRETCH)
    if setting == "strict":
        limits = pcg.Limits(finetuning_floor=0, idle_step_s=NEWCOMER_S)
        return executor.engine(limits, **options).start()
    promise_s = PROMISE * median_gap_s(executor)
    limits = pcg.Limits(tpot_slo_s=promise_s, idle_step_s=NEWCOMER_S)
    engine = executor.engine(limits, **options)
    engine.calibrate()
    return engine.start()


def median_gap_s(executor: Executor) -> float:
    """Return the median gap of the three tenants alone, in an engine without a promise."""
    with engine_of(executor, "default") as running:
        segment(running, 4)
        _, gaps = segment(running, 8)
    return statistics.median(seconds for seconds, _ in gaps)


# ----------------------------------------------------------------------------- the hostile tenant


class Hostile:
    """The attacks of a tenant, one after the other, until it is told to stop."""

    def __init__(
        self,
        executor: Executor,
        running: AsyncEngine,
        directory: Path,
        attacks: Sequence[Callable[[Hostile], None]],
    ) -> None:
        self.attacks = attacks
        self.executor = executor
        self.running = running
        self.directory = directory
        self.drawn = random.Random(1)
        self.counts: dict[str, int] = {}
        self.refused = 0
        self.wrong: list[str] = []
        self.jobs: list[RunningJob] = []
        self._names = itertools.count()
        self._stop = threading.Event()

    def submit(self, prompt: Any, adapter: Any = None, **fields: Any) -> Any:
        given = {"tenant": "hostile", "max_new_tokens": 16} | fields
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
        for prompt in ([VOCABULARY], [-1], [1.5], [10**5000], [], None, {"a": 1}):
            self.attempt(lambda prompt=prompt: self.submit(prompt))

    def flood(self) -> None:
        for turn in range(1000):
            self.attempt(lambda: self.submit([self.drawn.randrange(VOCABULARY)] * 8))
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
        rows = [{"input_ids": [self.drawn.randrange(VOCABULARY) for _ in range(32)]}] * 4
        examples = [Example([1, 2, 3] * 8, [1, 2, 3] * 8)] * 4
        for data in ([rows], examples):
            self.jobs.append(self.running.finetune(data, self.name(), max_steps=5, **JOB))

    def bad_data(self) -> None:
        for path in (self.directory / "bad.jsonl", self.directory / "none.jsonl", "\0", 5):
            self.attempt(lambda path=path: self.wait(path))

    def wait(self, data: Any) -> None:
        self.running.finetune(data, self.name(), max_steps=1, **JOB).wait(5)

    def listener(self) -> None:
        def raises(event: Event) -> None:
            raise ValueError("no")

        self.running.engine.log.listen(raises)

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
            self.refused += 1
        except Exception as error:
            self.wrong.append(repr(error))

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Attack on a thread of its own meanwhile."""
        self._stop.clear()
        thread = threading.Thread(target=self._attack, name="hostile")
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()

    def clear(self) -> None:
        """End what is left of its requests and jobs."""
        engine = self.running.engine

        def end() -> None:
            for one in engine.scheduler.everyone:
                if one.request.tenant not in TENANTS and not one.choice:
                    engine.cancel(one.id)

        self.running.run(end)
        for job in self.jobs:
            job.cancel()
        self.jobs.clear()

    def _attack(self) -> None:
        for attack in itertools.cycle(self.attacks):
            if self._stop.wait(0.2):
                return
            self.counts[attack.__name__] = self.counts.get(attack.__name__, 0) + 1
            attack(self)


ATTACKS = (
    Hostile.bad_fields, Hostile.flood, Hostile.huge_prompts, Hostile.cancelled,
    Hostile.nan_adapter, Hostile.removed_adapter, Hostile.diverging_job, Hostile.bad_data,
    Hostile.listener,
)  # fmt: skip


def write_bad_files(executor: Executor, directory: Path) -> None:
    """Write an adapter with NaN, and data that is none."""
    adapter = executor.add_adapter("nan", LORA)
    for tensor in adapter.tensors:
        tensor.fill_(math.nan)
    executor.save_adapter("nan", directory / "nan")
    executor.remove_adapter("nan")
    (directory / "bad.jsonl").write_bytes(b'{"text": "a"}\n{"text": 5\xff\n' + b"[" * 10_000)


# ----------------------------------------------------------------------------- the other tenants


def segment(running: AsyncEngine, seconds: float) -> tuple[list[tuple[int, ...]], list[Gap]]:
    """Run the schedule of the three tenants; returns their tokens, and the gaps between these."""
    drawn = random.Random(0)
    times: dict[str, list[Gap]] = {}

    def listen(event: Event) -> None:
        if event.kind is Kind.TOKEN and event.subject in times:
            times[event.subject].append((event.time_s, time.thread_time()))

    end = running.engine.log.listen(listen)
    streams = []
    began = time.perf_counter()
    for turn in range(int(seconds / EVERY_S) * len(TENANTS)):
        tenant = TENANTS[turn % len(TENANTS)]
        prompt = [drawn.randrange(3, VOCABULARY) for _ in range(drawn.randrange(8, 48))]
        due = began + turn * EVERY_S / len(TENANTS)
        time.sleep(max(0.0, due - time.perf_counter()))
        name = f"{tenant} {time.monotonic_ns()}"
        times[name] = []
        adapter = None if tenant == "a" else tenant
        fields = {"temperature": 1.0, "seed": turn} if turn % 2 else {}
        streams.append(
            running.submit(
                prompt, adapter, tenant=tenant, request_id=name, max_new_tokens=NEW,
                ignore_eos=True, **fields,
            )
        )  # fmt: skip
    tokens = [stream.wait(300).token_ids for stream in streams]
    end()
    pairs = [pair for one in times.values() for pair in itertools.pairwise(one)]
    return tokens, [(later[0] - one[0], later[1] - one[1]) for one, later in pairs]


def of_gaps(gaps: Sequence[float]) -> dict[str, float]:
    """Return the mean and percentiles of gaps, milliseconds."""
    cuts = statistics.quantiles(gaps, n=100)
    found = {"mean": statistics.fmean(gaps), "p50": cuts[49], "p90": cuts[89], "p99": cuts[98]}
    return {name: round(1000 * value, 1) for name, value in found.items()} | {"count": len(gaps)}


def each(executor: Executor, setting: str, length_s: float = 6.0) -> dict[str, Any]:
    """Return by how much gaps are longer beside each attack by itself, in processor time."""
    found = {}
    for attack in ATTACKS:
        alone = soak(executor, setting, 2 * length_s, length_s, (attack,))
        found[attack.__name__] = alone["ratio_processor"]
    return found


def soak(
    executor: Executor,
    setting: str,
    seconds: float,
    length_s: float,
    attacks: Sequence[Callable[[Hostile], None]] = ATTACKS,
) -> dict[str, Any]:
    """Run segments with and without the hostile tenant in turn; returns how they compare."""
    with tempfile.TemporaryDirectory() as folder, engine_of(executor, setting) as running:
        write_bad_files(executor, Path(folder))
        hostile = Hostile(executor, running, Path(folder), attacks)
        expected, _ = segment(running, length_s)  # warms up, too
        threads = {thread.name for thread in threading.enumerate()}
        same = True
        gaps: dict[str, list[Gap]] = {"without": [], "with": []}
        memory, served = [], 0
        rounds = max(1, round(seconds / 2 / length_s))
        for _ in range(rounds):
            found, some = segment(running, length_s)
            same &= found == expected
            gaps["without"] += some
            before = running.engine.totals.output_tokens
            with hostile.beside():
                found, some = segment(running, length_s)
            after = running.engine.totals.output_tokens
            served += after - before - sum(map(len, found))
            same &= found == expected
            gaps["with"] += some
            hostile.clear()
            gc.collect()
            memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        lost = [t for t in threads if t == "pcg engine"] and not running._thread.is_alive()
        found, _ = segment(running, length_s)
        same &= found == expected
        running.run(running.engine.check_integrity)
    wall, processor = (
        {name: of_gaps([gap[clock] for gap in some]) for name, some in gaps.items()}
        for clock in (0, 1)
    )
    return {
        "minutes": round(2 * rounds * length_s / 60, 2),
        "tokens_equal": same,
        "requests_compared": len(expected) * (2 * rounds + 1),
        "gaps_ms": wall,
        "ratio": ratios(wall),
        "gaps_processor_ms": processor,
        "ratio_processor": ratios(processor),
        "engine_thread_ended": bool(lost),
        "attacks": hostile.counts,
        "refused": hostile.refused,
        "hostile_tokens_per_s": round(served / rounds / length_s, 1),
        "other_errors": hostile.wrong[:5],
        "peak_rss_mib_by_round": [round(kib / 1024) for kib in memory],
    }


def ratios(times: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return by how much gaps are longer with the hostile tenant."""
    names = ("mean", "p50", "p90", "p99")
    return {name: round(times["with"][name] / times["without"][name], 2) for name in names}


def main() -> None:
    """Run the settings one after the other, and write what they gave."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="of each setting")
    parser.add_argument("--segment", type=float, default=20.0, help="seconds of a segment")
    parser.add_argument("--settings", default=",".join(SETTINGS))
    parser.add_argument("--each", action="store_true", help="compare each attack by itself, too")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    executor = pcg.compile(random_llama().eval())
    for seed, name in enumerate(TENANTS[1:]):
        executor.add_adapter(name, LORA, seed=seed)
    gc.collect()
    gc.freeze()  # as the server does
    before = RESULTS / "tenants.json"
    results = json.loads(before.read_text()) if before.exists() else {}
    for setting in arguments.settings.split(","):
        if setting not in SETTINGS:
            raise SystemExit(f"error: no setting {setting!r}; use {', '.join(SETTINGS)}")
        found = soak(executor, setting, 60 * arguments.minutes, arguments.segment)
        if arguments.each:
            found["ratio_processor_by_attack"] = each(executor, setting)
        results[setting] = found
        write("tenants", results)


if __name__ == "__main__":
    main()
