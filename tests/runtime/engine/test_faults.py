"""An error anywhere in a step ends what it belongs to, and nothing else."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, TypeAlias

import pytest

from pcg.errors import GenerationError
from pcg.peft.adapter import Adapter
from pcg.runtime.admission.limits import Limits
from pcg.runtime.data.example import Example
from pcg.runtime.engine.async_engine import AsyncEngine
from pcg.runtime.engine.device.clock import MachineClock
from pcg.runtime.engine.engine import Engine
from pcg.runtime.engine.scheduling.jobs import Job
from pcg.runtime.executor import Executor
from pcg.runtime.memory.kv_cache import bytes_of_page, kv_types
from pcg.runtime.metrics.events import EventLog
from pcg.runtime.requests.request import Request
from pcg.runtime.requests.sequence import Sequence
from tests.support import compiled
from tests.support.faults import Entered, Raising, is_fault, traced
from tests.support.small_engine import LORA
from tests.support.text_model import VOCABULARY, save_text_model
from tests.support.waiting import until

# A function is entered again where a generator of it is collected, in which nobody hears the fault.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

PAGES = 40
FEW = 24
STEPS = 1000
DATA = [Example(ids, ids) for ids in ([5, 6, 7, 8, 9, 10, 11], [9, 8, 7, 6, 5], [4] * 12)]
OPTIONS: dict[str, Any] = {"max_steps": 2, "batch_size": 2, "learning_rate": 0.01}
CALLED = (
    "Engine.step",
    "EngineLoop.step",
    "EngineLoop._isolating",
    "OpenRequests.take_chunks",
    "devices.py:on_device",
)
"""What a caller of steps enters itself, whose errors are the caller's."""
OF_THREAD = ("AsyncEngine._go_round", "Call.run", "_failing.<locals>.guarded")
"""What the thread enters before anything is tried."""
Trace: TypeAlias = Entered | Raising


@pytest.fixture(autouse=True)
def ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Move the engine's clock by a millisecond whenever it is read, so that all runs plan alike."""
    passed = itertools.count(1)
    monkeypatch.setattr(MachineClock, "_asked_ns", lambda _: next(passed) * 10**6)
    monkeypatch.setattr(MachineClock, "here_s", lambda clock: clock._latest_s)


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Executor:
    directory = save_text_model(tmp_path_factory.mktemp("model"))
    found = compiled.executor(str(directory), dtype="float32")
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
    """Return requests that are greedy, sampled, scored, of several continuations, and stopped."""
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


@dataclass
class Session:
    """An engine that goes on through one fault after the other.

    Attributes:
        expected: the tokens of each request, of each continuation.
        losses: those of the job.
        first: the number of the first request of the latest run.
    """

    executor: Executor
    engine: Engine
    asked: list[Request]
    expected: list[list[tuple[int, ...]]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    steps: int = 0
    first: int = 0

    def run(self, trace: Trace | None = None) -> set[str]:
        """Serve all requests, and train beside them; returns what failed: requests, the job."""
        job = self.engine.finetune(DATA, "trained", peft=LORA, **OPTIONS)
        done: list[dict[int, tuple[int, ...]]] = [{} for _ in self.asked]
        streamed: list[list[int]] = [[] for _ in self.asked]
        failed: set[str] = set()
        self.first = self.engine.submitted
        for step in range(400):
            if step < len(self.asked):
                try:
                    self.engine.submit(self.asked[step])
                except GenerationError as error:  # its adapter failed
                    check_fault(error)
                    failed.add(f"request {step}")
            elif self.engine.is_idle:
                break
            self.steps += 1
            with traced(trace):
                chunks = self.engine.step()
            for chunk in chunks:
                place = chunk.index - self.first
                if chunk.error is not None:
                    check_fault(chunk.error)
                    failed.add(f"request {place}")
                elif chunk.completion is not None:
                    assert chunk.completion.finish_reason == "length"
                    done[place][chunk.choice] = chunk.completion.token_ids
                if chunk.token_id is not None:
                    streamed[place].append(chunk.token_id)
        else:
            raise AssertionError("the engine goes on for ever")
        found = [[one[choice] for choice in sorted(one)] for one in done]
        self.expected = self.expected or found
        for place, request in enumerate(self.asked):
            if f"request {place}" not in failed:
                assert found[place] == self.expected[place]
                if request.params.width == 1:  # no token is lost, none comes twice
                    assert [tuple(streamed[place])] == found[place]
        if job.error is not None:
            check_fault(job.error)
            failed.add("job")
        else:
            self.losses = self.losses or job.result.losses
            assert job.result.losses == pytest.approx(self.losses, rel=1e-3)
        self.check()
        return failed

    def check(self) -> None:
        """No page is lost, and nothing is left but what may be found again."""
        if "trained" in self.executor.adapters:
            self.executor.remove_adapter("trained")
        check_empty(self.engine)

    def functions(self, is_hit: Callable[[FrameType], bool] = lambda frame: True) -> list[str]:
        """Return the functions that steps of a mixed run enter."""
        entered = Entered(is_hit)
        assert not self.run(entered)
        return sorted(name for name in entered.names if not name.endswith(CALLED))


def check_fault(error: Exception) -> None:
    """It is a fault, or what became of it for others of the adapter."""
    assert is_fault(error) or "failed by Fault" in str(error), error


def check_empty(engine: Engine) -> None:
    engine.check_integrity()
    assert engine.is_idle
    assert engine.pool.free + engine.scheduler.adapters.idle_pages == PAGES
    assert not engine.scheduler.backlog.requests
    assert not engine.requests.by_id
    assert not engine.state.is_trained("trained")


@pytest.fixture
def session(executor: Executor) -> Iterator[Session]:
    session = Session(executor, make_engine(executor), workload(executor))
    for _ in range(2):  # the second has tokens in the cache
        assert not session.run()
    yield session
    for job in list(session.engine.jobs):
        session.engine.cancel_job(job.name)


def some(few: int, parts: int = 1) -> list[Any]:
    """Return slices of all faults: a few of them, and so many parts, which are slow together."""
    slow = [pytest.param(slice(part, None, parts), marks=pytest.mark.slow) for part in range(parts)]
    return [slice(few), *slow]


def faults(names: list[str]) -> list[tuple[str, int]]:
    """Return some of the functions, and which time each is entered, in any order."""
    found = [(name, nth) for nth in (1, 2, 5) for name in names]
    random.Random(0).shuffle(found)
    return found


@pytest.mark.parametrize("chosen", some(FEW, 12))
def test_anywhere_once(session: Session, chosen: slice) -> None:
    """Nobody fails but one request or the job for which the function worked, if it did for any."""
    names = session.functions()
    assert len(names) > 500
    fired, tried = 0, faults(names)[chosen]
    for name, nth in tried:
        raising = Raising(name, nth)
        assert len(session.run(raising)) <= raising.fired, name
        fired += raising.fired
    assert fired > len(tried) / 2
    steps = session.steps
    while len(tried) > FEW and session.steps < steps + STEPS:
        assert not session.run()


OWNERS: list[tuple[type, str, set[str]]] = [
    (Sequence, "request 1", {"request 1"}),
    (Adapter, "b", {"request 1", "request 6"}),
    (Job, "trained", {"job"}),
]


@pytest.mark.parametrize(("kind", "name", "own"), OWNERS)
@pytest.mark.parametrize("chosen", some(5))
def test_for_one_owner_in_every_step(
    session: Session, kind: type, name: str, own: set[str], chosen: slice
) -> None:
    """Where a function fails in each step that enters it for one owner, nobody else fails."""

    def is_hit(frame: FrameType) -> bool:
        owners = (one for one in frame.f_locals.values() if isinstance(one, kind))
        return any(is_owner(one) for one in owners)

    def is_owner(one: Any) -> bool:
        return (
            f"request {one.number - session.first}" == name
            if kind is Sequence
            else (one.name == name)
        )

    names = session.functions(is_hit)
    random.Random(1).shuffle(names)
    failed = []
    for function in names[chosen]:
        found = session.run(Raising(function, 1, is_hit, ever=True))
        assert found <= own, function
        failed += found
        session.engine._suspects.forgive(session.executor.adapters["b"])
    assert failed or kind is Adapter


class ThreadSession:
    """The engine on its thread, asked by another one."""

    def __init__(self, executor: Executor, expected: list[list[tuple[int, ...]]]) -> None:
        self.executor, self.asked, self.expected = executor, workload(executor), expected
        self.running: AsyncEngine = make_engine(executor).start()

    def run(self, trace: Trace | None = None) -> set[str]:
        running = self.running
        running.run(lambda: sys.settrace(trace))
        streams = {f"request {i}": running.submit_request(r) for i, r in enumerate(self.asked)}
        left = running.submit_request(self.asked[0])
        left.cancel()
        job = running.finetune(DATA, "trained", peft=LORA, **OPTIONS)
        failed: set[str] = set()
        waits: dict[str, Callable[[], Any]] = {
            name: lambda stream=stream: stream.wait_all(60) for name, stream in streams.items()
        }
        for name, wait in {
            **waits,
            "left": lambda: left.wait(60),
            "job": lambda: job.wait(60),
        }.items():
            try:
                found = wait()
            except TimeoutError:
                raise
            except Exception as error:
                check_fault(error)
                failed.add(name)
            else:
                if name in streams:
                    place = list(streams).index(name)
                    assert [one.token_ids for one in found] == self.expected[place]
        running.run(lambda: sys.settrace(None))
        until(lambda: running.run(lambda: running.engine.is_idle) and not running._streams.open)
        if "trained" in self.executor.adapters:
            running.remove_adapter("trained").result(60)
        running.run(lambda: check_empty(running.engine))  # type: ignore[arg-type]
        assert not len(running._streams.arrivals)
        return failed


@pytest.mark.parametrize("chosen", some(10, 3))
def test_anywhere_on_the_thread(executor: Executor, session: Session, chosen: slice) -> None:
    """Calls, deliveries and what is settled between steps: the thread goes on, nobody waits."""
    in_steps = set(session.functions())
    threads = ThreadSession(executor, session.expected)
    with threads.running:
        entered = Entered()
        assert not threads.run() | threads.run(entered)
        names = [name for name in entered.names - in_steps if not name.endswith(OF_THREAD)]
        fired = 0
        for name, nth in faults(sorted(names))[chosen]:
            raising = Raising(name, nth)
            assert len(threads.run(raising)) <= 1, name
            fired += raising.fired
        assert fired
        assert not threads.run()
