"""Measure the engine's own work in a step: scheduler, pool, adapters, batches, bookkeeping.

    python benchmarks/bench_scheduler.py [--rounds 5] [--tokens 50000]

The program is a stub that computes nothing, so that all of a step's time is the engine's. The
engine is always full: each request that ends is followed by another. Requests choose adapters by
Zipf's law, and the pool has room for about a quarter of 2,000 of them beside the requests.

    engine     scheduler, pool, adapters' pages, policy, latencies, events and requests' tokens
    step       that, and what the device's side does beside the program: the batch of tokens,
               positions and rows, groups of sequences for attention, adapters' slots and segments,
               and sampling's parameters; adapters have no weights that would be copied to slots
    ahead      that, where a step begins before the tokens of the one before are read, as on a GPU

Contenders: 64, 256, 1,024 and 4,096 running requests over 2,000 adapters, and 256 requests over 100
and 10,000. Reported: microseconds a request in a step; how a step grows from each number of
requests to the next, which is four times as many; and the share of a step of Llama-3.1-8B on an
A100 as its cost model predicts it, with LoRA of rank 16 on every linear layer and the contexts that
the requests have.

    queue      microseconds of the engine in a step of 256 running requests of 8 tenants, by how
               many requests wait behind them, under each policy; the ratio to 10 that wait

Each contender is a process of its own, so that no other's objects are in its caches or visited by
its garbage collector, which does not visit imported modules either. Times are of the thread
itself, so that what else the machine runs does not count; results are medians over rounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import multiprocessing
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

import torch
from measure import interleave, medians, ratio, write
from transformers import AutoModelForCausalLM, LlamaConfig

import pcg
from pcg.parallel.costs.step_costs import SequenceChunk, StepShape
from pcg.ranks.group import SINGLE_RANK
from pcg.runtime.adapters.cache import AdapterCache
from pcg.runtime.admission.fair_share import FairShare
from pcg.runtime.admission.latency import Latencies, Latency
from pcg.runtime.admission.limits import Limits
from pcg.runtime.admission.policies import AdapterClustering, EarlyAbort, Fcfs
from pcg.runtime.admission.policy import Policy
from pcg.runtime.engine.device.clock import MachineClock
from pcg.runtime.engine.device.device import Device, Finished
from pcg.runtime.engine.device.step_runner import StepRunner
from pcg.runtime.engine.loop import EngineLoop
from pcg.runtime.engine.options import EngineOptions
from pcg.runtime.engine.scheduling.scheduler import Scheduler
from pcg.runtime.memory.kv_cache import KvCache, kv_types
from pcg.runtime.memory.pool import PagePool
from pcg.runtime.metrics.events import EventLog
from pcg.runtime.model.batch import Batch
from pcg.runtime.model.merged_execution import ProductRequest
from pcg.runtime.requests.request import Request
from pcg.runtime.requests.sequence import Sequence as Running
from pcg.runtime.requests.step import Results
from pcg.runtime.sampling.sampling_params import SamplingParams
from pcg.simulate.simulated_program import SimulatedProgram, simulated_program

ADAPTERS = 2000
PAGES_OF_ADAPTER = 4
PAGES_OF_REQUEST = 16
TENANTS = 8
WAITING = (10, 1000, 10_000)
POLICIES: dict[str, Callable[[], Policy]] = {
    "fcfs": Fcfs,
    "fair-share": FairShare,
    "adapter-clustering": AdapterClustering,
    "early-abort": EarlyAbort,
}
RUNNING = (64, 256, 1024, 4096)
Make: TypeAlias = Callable[[int], tuple[Device, PagePool, AdapterCache]]
MODEL, DEVICE, RANK = "meta-llama/Llama-3.1-8B", "A100-80", 16


@dataclass(frozen=True, eq=False)
class StubAdapter:
    """An adapter without tensors."""

    name: str
    size_bytes: int = PAGES_OF_ADAPTER
    prompt_tokens: int = 0
    weights: Mapping[str, Any] = field(default_factory=dict)
    version: int = field(default_factory=itertools.count(1).__next__, init=False)


class StubDevice:
    """A device that returns tokens at once."""

    cache = None
    side = None
    fails_alike = True
    is_ahead = False
    late: Mapping[str, int] = {}
    copies_bytes = 0

    def open(self, request: Request, number: int) -> Running:
        return Running(request.named(number), number, request, request.params.max_new_tokens, 0.0)

    def prefetch(self, adapters: Any) -> None:
        """Do nothing: adapters have no tensors."""

    def copy_page(self, page: int, to: int) -> None:
        """Do nothing: there are no keys and values."""

    def is_copying(self, adapter: Any) -> bool:
        return False

    def evict(self, adapter: Any) -> None:
        """Do nothing: adapters have no tensors."""

    def reset(self) -> None:
        """Do nothing: nothing fails."""

    def start(self, chunks: Any, windows: Any) -> Finished:
        ready = [sequence for sequence, count in chunks if count == sequence.pending]
        return Finished(lambda: Results(dict.fromkeys(ready, 1)))

    def check_alive(self) -> None:
        """Do nothing: nothing fails."""

    def run_parts(self, parts: Any) -> None:
        """Do nothing: there are no jobs."""


class StubProgram:
    """A program that computes nothing, and reads of a batch what emitted attention reads once."""

    ranks = SINGLE_RANK
    drawing = None

    def hidden_requests(self, batch: Batch, adapters: Any) -> ProductRequest[list[torch.Tensor]]:
        batch.decode_groups(0)
        return [batch.input_ids]
        yield

    def logits_of(
        self, inputs: Sequence[torch.Tensor], batch: Batch, adapters: Any, rows: Any, last: Any
    ) -> torch.Tensor:
        (ids,) = inputs
        return torch.zeros(len(ids if rows is None else rows), 2)


def adapter_pages(pool: PagePool) -> AdapterCache:
    """Return a cache of adapters that say how many pages they take."""
    return AdapterCache(pool, lambda adapter: adapter.size_bytes)


def engine_alone(pages: int) -> tuple[Device, PagePool, AdapterCache]:
    """Return a device that does nothing, and a pool of so many pages."""
    pool = PagePool(pages)
    return StubDevice(), pool, adapter_pages(pool)


def with_batches(pages: int) -> tuple[Device, PagePool, AdapterCache]:
    """Return a device whose program is a stub, and the pool of its cache of so many pages."""
    config = LlamaConfig(
        hidden_size=4,
        intermediate_size=4,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        vocab_size=8,
    )
    executor = pcg.compile(AutoModelForCausalLM.from_config(config).eval())
    cache = KvCache(kv_types(executor.serving.runner.model), pages, executor.device)
    adapters = adapter_pages(cache.pool)
    device = StepRunner(executor.state, cache, adapters, Limits(running=max(RUNNING)))
    program: Any = StubProgram()
    device.use(dataclasses.replace(executor.serving, runner=program))
    return device, cache.pool, adapters


def ahead(pages: int) -> tuple[Device, PagePool, AdapterCache]:
    """Return such a device that runs beside the host, so that each step is read one step late."""
    device, pool, adapters = with_batches(pages)
    device.is_ahead = True
    return device, pool, adapters


class Load:
    """An engine that always has so many running requests.

    Args:
        make: makes a device with so many pages, and their pool.
        program: the program whose time is predicted.
        waiting: the number of requests that wait behind those that run.
        policy: the order in which these are admitted.
    """

    def __init__(
        self,
        running: int,
        adapters: int,
        make: Make,
        program: SimulatedProgram,
        waiting: int = 8,
        policy: str = "fcfs",
    ) -> None:
        self._random = random.Random(running)
        self._program = program
        self.running = running
        pages = running * PAGES_OF_REQUEST + PAGES_OF_ADAPTER * ADAPTERS // 4
        device, pool, pages_of_adapters = make(pages)
        # With an SLO for the first token early abort has something to look for.
        limits = Limits(running=running, tokens=1 << 20, tpot_slo_s=60.0, ttft_slo_s=1e6)
        scheduler = Scheduler(pool, pages_of_adapters, limits, POLICIES[policy]())
        latencies = Latencies(Latency(1e-6, 1e-9, 1e-12), Latency(1e-6, 1e-9, 1e-12))
        options = EngineOptions(log=EventLog(10_000), latencies=latencies)
        self.engine = EngineLoop(device, scheduler, MachineClock(), options)
        self._adapters = [StubAdapter(f"adapter {i}") for i in range(adapters)]
        self._shares = [1 / (i + 1) for i in range(adapters)]
        for _ in range(running + waiting):
            self._submit()
        for _ in range(200):
            self._step()

    def _submit(self) -> None:
        (adapter,) = self._random.choices(self._adapters, self._shares)
        prompt, new = self._random.randint(16, 96), self._random.randint(32, 128)
        params, tenant = SamplingParams(max_new_tokens=new), str(self._random.randrange(TENANTS))
        self.engine.submit(Request((1,) * prompt, params, adapter, tenant))

    def _step(self) -> float:
        started = time.thread_time()
        chunks = self.engine.step()
        took = time.thread_time() - started
        for chunk in chunks:
            if chunk.completion is not None:
                self._submit()
        return took

    def request_us(self, tokens: int) -> float:
        """Return microseconds a request in a step, over steps of so many tokens together."""
        steps = max(1, tokens // self.running)
        return sum(self._step() for _ in range(steps)) / steps / self.running * 1e6

    def step_us(self, tokens: int) -> float:
        """Return microseconds of a step, over steps of so many tokens together."""
        return self.request_us(tokens) * self.running

    def foretold_us(self) -> float:
        """Return the predicted microseconds of the program for a token of each running request."""
        running = self.engine.scheduler.running
        pieces = [
            SequenceChunk(1, one.cached, True, adapter=one.request.adapter, rank=RANK)
            for one in running
        ]
        return self._program.costs.step_seconds(StepShape.of(pieces)) * 1e6


class LoadApart:
    """A `Load` in a process of its own, with the same arguments."""

    def __init__(self, running: int, *arguments: Any) -> None:
        context = multiprocessing.get_context("fork")
        self.running = running
        self._pipe, its = context.Pipe()
        context.Process(target=_answer, args=(its, running, *arguments), daemon=True).start()

    def ask(self, what: str, *arguments: int) -> float:
        """Return the result of a method of the load."""
        self._pipe.send((what, arguments))
        found: float = self._pipe.recv()
        return found


def _answer(pipe: Connection, *arguments: Any) -> None:
    load = Load(*arguments)
    while True:
        what, arguments = pipe.recv()
        pipe.send(getattr(load, what)(*arguments))


def main() -> None:
    """Run all loads and write the result file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=50_000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    program = simulated_program(MODEL, DEVICE)
    cases = [(running, ADAPTERS) for running in RUNNING] + [(256, 100), (256, 10_000)]
    result: dict[str, Any] = {}
    makers = {"engine": engine_alone, "step": with_batches, "ahead": ahead}
    gc.collect()
    gc.freeze()
    for name, make in makers.items():
        loads = {_name(*case): LoadApart(*case, make, program) for case in cases}
        measured: dict[str, Callable[[], float]] = {
            case: partial(load.ask, "request_us", arguments.tokens) for case, load in loads.items()
        }
        found = interleave(measured, arguments.rounds)
        sizes = [(_name(n, ADAPTERS), n) for n in RUNNING]
        result[name] = {
            "us_a_request": medians(found),
            "growth": {
                f"{after} / {before}": round(ratio(found, b, a) * after / before, 2)
                for (a, before), (b, after) in pairwise(sizes)
            },
            "share_of_a_step": {
                case: round(us * load.running / load.ask("foretold_us"), 4)
                for (case, us), load in zip(medians(found).items(), loads.values(), strict=True)
            },
        }
    result["queue"] = _queues(program, arguments.rounds, arguments.tokens)
    write(
        "scheduler", {"share_of_a_step_of": f"{MODEL} on {DEVICE}, LoRA of rank {RANK}", **result}
    )


def _queues(program: SimulatedProgram, rounds: int, tokens: int) -> dict[str, Any]:
    """Return what a step costs behind which more and more requests wait, by policy."""
    loads = {
        f"{policy}, {waiting} wait": LoadApart(256, 100, engine_alone, program, waiting, policy)
        for policy in POLICIES
        for waiting in WAITING
    }
    measured: dict[str, Callable[[], float]] = {
        case: partial(load.ask, "step_us", tokens) for case, load in loads.items()
    }
    found = interleave(measured, rounds)
    return {
        "us_a_step": medians(found),
        "to_10": {
            f"{policy}, {waiting} wait": ratio(
                found, f"{policy}, {waiting} wait", f"{policy}, {WAITING[0]} wait"
            )
            for policy in POLICIES
            for waiting in WAITING[1:]
        },
    }


def _name(running: int, adapters: int) -> str:
    return f"{running} requests, {adapters} adapters"


if __name__ == "__main__":
    main()
