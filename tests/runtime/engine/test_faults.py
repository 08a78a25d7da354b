"""An error anywhere in a step ends what it belongs to, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

import pcg.compiler as compiler
from pcg.errors import PcgError
from pcg.runtime.data.example import Example
from pcg.runtime.engine.engine import Engine
from pcg.runtime.engine.jobs import Job
from pcg.runtime.engine.limits import Limits
from pcg.runtime.executor import Executor
from pcg.runtime.memory.kv_cache import bytes_of_page, kv_types
from pcg.runtime.metrics.events import EventLog
from pcg.runtime.requests.request import Chunk, Request
from tests.support.faults import Fault, Raising, entered
from tests.support.small_engine import LORA
from tests.support.text_model import VOCABULARY, save_text_model

PAGES = 40
OPTIONS: dict[str, Any] = {"max_steps": 2, "batch_size": 2, "learning_rate": 0.01}
WRAPPERS = ("EngineLoop.step", "Engine.step", "._isolating", "OpenRequests.take_chunks")
"""What an error leaves by, or the caller's own call."""


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Executor:
    found = compiler.compile(str(save_text_model(tmp_path_factory.mktemp("model"))), dtype="float32")
    for seed, (name, rank) in enumerate({"a": 4, "b": 16, "c": 8}.items()):
        adapter = found.add_adapter(name, LORA | {"r": rank}, seed=seed)
        for tensor in adapter.tensors:
            tensor.add_(0.05)
        found.refresh_adapter(name)
    return found


def make_engine(executor: Executor) -> Engine:
    page_bytes = bytes_of_page(kv_types(executor.serving.runner.model))
    limits = Limits(tokens=24, running=6)
    return executor.engine(limits, kv_cache_bytes=PAGES * page_bytes, log=EventLog(1000))


def workload(executor: Executor) -> list[Request]:
    """Return requests of every kind: greedy, sampled, scored, several, guided and pooled."""
    drawn = random.Random(0)

    def request(tokens: int, adapter: str | None, **fields: Any) -> Request:
        prompt = [drawn.randrange(3, VOCABULARY) for _ in range(tokens)]
        fields = {"max_new_tokens": 4, "ignore_eos": True, "timeout_s": 1e6} | fields
        return executor.request(prompt, adapter, **fields)

    return [
        request(20, "a", tenant="x"),
        request(5, "b", tenant="y", temperature=1.0, seed=1, top_p=0.9),
        request(33, None, logprobs=2, prompt_logprobs=1),
        request(18, "c", n=2, temperature=1.0, seed=3, tenant="x"),
        request(40, "a", stop=["zzz"], repetition_penalty=1.2, priority=1),
        request(7, None, n=1, best_of=2, temperature=1.0, seed=5, tenant="y"),
        request(20, "b", tenant="x"),
    ]


DATA = [Example(ids, ids) for ids in ([5, 6, 7, 8, 9, 10, 11], [9, 8, 7, 6, 5], [4] * 12)]


def is_fault(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, Fault):
        error = error.__cause__ or error.__context__
    return error is not None


@dataclass
class Session:
    """An engine that goes on, through one fault after the other."""

    executor: Executor
    engine: Engine
    asked: list[Request]
    expected: list[list[tuple[int, ...]]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    steps: int = 0

    def job(self) -> Job:
        return self.engine.finetune(DATA, "trained", peft=LORA, **OPTIONS)

    def run(self, fault: Raising | None = None, *, trains: bool = True) -> set[str]:
        """Serve all requests, and train; returns those that failed: adapters, numbers, the job."""
        job = self.job() if trains else None
        numbers: dict[int, int] = {}
        done: dict[int, dict[int, tuple[int, ...]]] = {}
        texts: dict[int, list[int]] = {}
        failed: set[str] = set()
        for _ in range(400):
            if len(numbers) < len(self.asked):
                place = len(numbers)
                numbers[self.engine.submitted] = place
                self.engine.submit(self.asked[place])
            for chunk in self.step(fault):
                place = numbers[chunk.index]
                if chunk.error is not None:
                    assert is_fault(chunk.error), chunk.error
                    failed.add(f"request {place}")
                    continue
                if chunk.token_id is not None and self.asked[place].params.width == 1:
                    texts.setdefault(place, []).append(chunk.token_id)
                if chunk.completion is not None:
                    assert chunk.completion.finish_reason in ("stop", "length")
                    done.setdefault(place, {})[chunk.choice] = chunk.completion.token_ids
            if self.engine.is_idle and len(numbers) == len(self.asked):
                break
        else:
            raise AssertionError("the engine goes on for ever")
        for place in range(len(self.asked)):
            found = [tokens for _, tokens in sorted(done.get(place, {}).items())]
            if f"request {place}" in failed:
                continue
            if not self.expected or place >= len(self.expected):
                self.expected.append(found)
            assert found == self.expected[place], place
            if place in texts:
                assert [tuple(texts[place])] == found, "a chunk is lost, or came twice"
        if job is not None:
            if job.error is not None:
                assert is_fault(job.error), job.error
                failed.add("job")
            else:
                self.losses = self.losses or job.result.losses
                assert job.result.losses == pytest.approx(self.losses, rel=1e-3)
        if "trained" in self.executor.adapters:
            self.executor.remove_adapter("trained")
        self.check()
        return failed

    def step(self, fault: Raising | None) -> list[Chunk]:
        self.steps += 1
        if fault is None:
            return self.engine.step()
        with fault.armed():
            return self.engine.step()

    def check(self) -> None:
        """No page is lost, and nothing is left but what may be found again."""
        engine, scheduler = self.engine, self.engine.scheduler
        engine.check_integrity()
        assert engine.pool.free + scheduler.adapters.idle_pages == PAGES
        assert not scheduler.backlog.requests
        assert not engine.requests.by_id
        assert "trained" not in engine.state._trained


@pytest.fixture(scope="module")
def session(executor: Executor) -> Iterator[Session]:
    session = Session(executor, make_engine(executor), workload(executor))
    session.run()
    session.run()
    yield session


def functions(session: Session) -> list[str]:
    """Return the functions that steps of a mixed run enter, wrappers aside."""
    found: dict[str, int] = {}
    step = session.engine.step
    fault = Raising("")
    fault.armed = lambda: entered(found)  # type: ignore[method-assign]
    assert not session.run(fault)
    assert session.engine.step == step
    return sorted(name for name in found if not name.endswith(WRAPPERS))
