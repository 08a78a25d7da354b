"""Random lives of a simulated engine, and what must hold of it at every step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

from pcg.errors import OutOfMemoryError
from pcg.kernels.sizes import PAGE_TOKENS
from pcg.runtime.admission.fair_share import FairShare
from pcg.runtime.admission.latency import Latencies, Latency
from pcg.runtime.admission.limits import Limits
from pcg.runtime.admission.policies import AdapterClustering, EarlyAbort, Fcfs
from pcg.runtime.admission.policy import Policy
from pcg.runtime.engine.device.device import Launched
from pcg.runtime.metrics.events import Event, EventLog, Kind
from pcg.runtime.metrics.status import JobState
from pcg.runtime.requests.request import Request
from pcg.runtime.requests.sequence import Sequence
from pcg.runtime.sampling.sampling_params import SamplingParams
from pcg.simulate.simulated_device import SimulatedAdapter
from pcg.simulate.simulated_engine import SimulatedEngine
from tests.support.linear_costs import LinearCosts

POLICIES: dict[str, Callable[[], Policy]] = {
    "fcfs": Fcfs,
    "clustering": lambda: AdapterClustering(2),
    "early abort": EarlyAbort,
    "fair share": FairShare,
}
PAGE_BYTES = 64

REQUESTS = {
    None: {Kind.SUBMITTED},
    Kind.SUBMITTED: {Kind.REFUSED, Kind.ADMITTED, Kind.CANCELLED, Kind.TIMED_OUT},
    Kind.ADMITTED: {Kind.TOKEN, Kind.PREEMPTED, Kind.CANCELLED, Kind.TIMED_OUT},
    Kind.TOKEN: {Kind.TOKEN, Kind.FINISHED, Kind.PREEMPTED, Kind.CANCELLED, Kind.TIMED_OUT},
    Kind.PREEMPTED: {Kind.ADMITTED, Kind.CANCELLED, Kind.TIMED_OUT, Kind.FAILED},
}
JOBS = {
    None: {Kind.QUEUED},
    Kind.QUEUED: {Kind.STARTED, Kind.CANCELLED},
    Kind.STARTED: {Kind.STEPPED, Kind.PAUSED, Kind.COMPLETED, Kind.CANCELLED, Kind.FAILED},
    Kind.STEPPED: {Kind.STEPPED, Kind.PAUSED, Kind.COMPLETED, Kind.CANCELLED, Kind.FAILED},
    Kind.PAUSED: {Kind.RESUMED, Kind.CANCELLED},
    Kind.RESUMED: {Kind.STEPPED, Kind.PAUSED, Kind.COMPLETED, Kind.CANCELLED, Kind.FAILED},
}
"""What may follow what, of one subject, as `pcg.runtime.metrics.events` says."""


class RowContents:
    """Stands before an engine's device: writes the rows of each step, then reads as attention does.

    A row's content stands for all that its keys and values depend on: the version of the adapter,
    and the tokens up to its own. Rows that nobody keeps hold nothing.

    Attributes:
        fails: whether the device breaks down in the midst of a step.
        wrong: what was wrong with a step; the engine would drop its requests and go on.
    """

    class Failure(Exception):
        """The device broke down."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self.fails = False
        self.wrong: AssertionError | None = None
        self._engine = engine
        self._start = engine.device.start
        self._pages: dict[int, list[int]] = {}
        self._expected: dict[str, list[int]] = {}
        self._adapters: dict[int, object] = {}
        engine.device.start = self.start  # type: ignore[method-assign]

    def start(self, chunks: list[tuple[Sequence, int]], windows: Any) -> Launched:
        try:
            self._check(chunks)
        except AssertionError as error:
            self.wrong = self.wrong or error
        return self._start(chunks, windows)

    def _check(self, chunks: list[tuple[Sequence, int]]) -> None:
        """Write the rows of a step, and see that every sequence reads what it wrote."""
        self._lose_what_nobody_keeps()
        written: set[int] = set()
        for sequence, count in chunks:
            assert sequence.table is not None
            expected = self._contents(sequence)
            for place in range(sequence.cached, sequence.cached + count):
                row = sequence.table.rows(place, place + 1)[0]
                assert row not in written, "two sequences write a row"
                written.add(row)
                self._pages[row // PAGE_TOKENS][row % PAGE_TOKENS] = expected[place]
            if self.fails:
                raise self.Failure
        for sequence, count in chunks:
            end = sequence.cached + count
            assert sequence.table is not None
            expected = self._contents(sequence)[:end]
            found = [row for page in sequence.table.pages for row in self._pages[page]]
            assert found[:end] == expected, f"{sequence.id} reads rows of others"

    def _lose_what_nobody_keeps(self) -> None:
        pool = self._engine.pool
        kept = set(pool.shared)
        for sequence in self._engine.scheduler.running:
            assert sequence.table is not None
            kept |= set(sequence.table.pages)
        for page in range(pool.size):
            if page not in kept or page not in self._pages:
                self._pages[page] = [0] * PAGE_TOKENS

    def _contents(self, sequence: Sequence) -> list[int]:
        """Of each of its tokens."""
        adapter = sequence.request.adapter
        self._adapters[id(adapter)] = adapter  # so that no other gets its id
        found = self._expected.setdefault(sequence.id, [])
        for token in sequence.ids(len(found), sequence.length):
            found.append(hash((found[-1] if found else id(adapter), token)))
        return found


class EngineLife:
    """An engine, what was asked of it, and what came of that.

    Attributes:
        engine: the simulated one, with a log that is read and not kept.
        adapters: by name; requests use these versions.
        wanted: tokens of each request that is not over.
        came: tokens that came of each request.
        finished: requests that did.
        cached: tokens of prompts that were in the cache already.
        last: what happened to each request and job at last.
        resident: versions of each adapter that have pages.
    """

    def __init__(
        self,
        policy: str = "fcfs",
        pages: int = 24,
        promises: bool = True,
        seed: int = 0,
        prefix_caching: bool = True,
    ) -> None:
        self.random = Random(seed)
        latencies = Latencies(Latency(0.02, 5e-5, 2e-8), Latency(0.01, 1e-4, 1e-8))
        limits = Limits(
            running=8,
            tokens=64,
            least_chunk=3,
            ttft_slo_s=5.0 if promises else None,
            tpot_slo_s=0.05 if promises else None,
            prefetched=3,
        )
        self.engine = SimulatedEngine(
            LinearCosts(),
            pages,
            PAGE_BYTES,
            limits,
            policy=POLICIES[policy](),
            latencies=latencies if promises else None,
            log=EventLog(0),
            prefix_caching=prefix_caching,
        )
        self._contents = RowContents(self.engine)
        self.adapters: dict[str, SimulatedAdapter] = {}
        self.wanted: dict[str, int] = {}
        self.came: Counter[str] = Counter()
        self.finished = 0
        self.cached = 0
        self.last: dict[str, Kind] = {}
        self.resident: Counter[str] = Counter()
        self.time_s = 0.0
        self._jobs = 0
        self._wrong: AssertionError | None = None
        self.engine.log.listen(self._listen)

    # --------------------------------------------------------------------------- operations

    def submit(
        self,
        prompt: int,
        tokens: int,
        adapter: str | None,
        tenant: str,
        timeout_s: float | None,
        own: int = 0,
    ) -> None:
        """Prompts are alike but for so many tokens at their end."""
        request = Request(
            (1,) * (prompt - own) + tuple(self.random.choices((1, 2), k=min(own, prompt))),
            SamplingParams(max_new_tokens=tokens),
            None if adapter is None else self.adapters[adapter],
            tenant,
            timeout_s=timeout_s,
        )
        try:
            name = self.engine.submit(request)
        except OutOfMemoryError:
            return
        self.wanted[name] = tokens

    def cancel(self, place: int) -> None:
        if self.wanted:
            self.engine.cancel(list(self.wanted)[place % len(self.wanted)])

    def add_adapter(self, name: str, pages: int, virtual: int) -> None:
        """Also in place of one of that name, which serves its requests to their end."""
        self.adapters[name] = SimulatedAdapter(name, pages * PAGE_BYTES - 1, 8, virtual)

    def remove_adapter(self, name: str) -> None:
        adapter = self.adapters.pop(name, None)
        if adapter is not None:
            self.engine.forget(adapter)

    def start_job(self, lengths: list[list[int]]) -> None:
        self.engine.finetune(f"job {self._jobs}", lengths)
        self._jobs += 1

    def change_job(self, place: int, how: str) -> None:
        if self.engine.jobs:
            job = self.engine.jobs[place % len(self.engine.jobs)]
            getattr(self.engine, f"{how}_job")(job.name)

    def fail(self) -> None:
        """A step whose device breaks down once it has written something.

        What ran in it runs alone next, or is dropped if it was alone.
        """
        self._contents.fails = True
        self.engine.step()
        self._contents.fails = False
        self.check()

    def step(self) -> None:
        before = self.engine.clock.now_s()
        had_work = not self.engine.is_idle
        for chunk in self.engine.step():
            if chunk.completion is not None and chunk.completion.finish_reason == "length":
                name = f"request {chunk.index}"
                assert len(chunk.completion.token_ids) == self.came[name]
        # A paused job keeps its pages; others may wait for these.
        blocked = any(job.state is JobState.PAUSED for job in self.engine.jobs)
        if had_work and not self.engine.is_idle and not blocked:
            assert self.engine.clock.now_s() > before, "a step with work to do did nothing"
        self.check()

    def random_operation(self) -> None:
        """One of all that can be done to an engine."""
        random = self.random
        kind = random.choices(
            ["submit", "cancel", "add", "remove", "start", "job", "step", "fail"],
            [20, 3, 2, 1, 1, 2, 60, 0.5],
        )[0]
        if kind == "submit":
            adapter = random.choice([None, *self.adapters])
            timeout = random.choice([None, None, None, 0.01, 0.5])
            sizes = random.randint(1, 90), random.randint(1, 20)
            own = random.choice([0, 5, 40, 90])
            self.submit(*sizes, adapter, random.choice("abc"), timeout, own)
        elif kind == "cancel":
            self.cancel(random.randrange(1000))
        elif kind == "add":
            virtual = random.choice([0, 0, 5])
            self.add_adapter(random.choice("pqrstu"), random.randint(1, 6), virtual)
        elif kind == "remove":
            self.remove_adapter(random.choice("pqrstu"))
        elif kind == "start":
            if len(self.engine.jobs) < 3:
                self.start_job([[random.randint(1, 70)] * random.randint(1, 3) for _ in range(3)])
        elif kind == "job":
            self.change_job(random.randrange(10), random.choice(["pause", "resume", "cancel"]))
        elif kind == "fail":
            self.fail()
        else:
            self.step()
        self.check()

    def finish(self, most_steps: int) -> None:
        """Go on to the end of all requests and jobs: in so many steps."""
        for job in list(self.engine.jobs):
            self.engine.resume_job(job.name)
        for _ in range(most_steps):
            if self.engine.is_idle:
                break
            self.step()
        self.engine.step()  # hands out what was given up after the last one
        assert self.engine.is_idle, "requests or jobs are stuck"
        assert not self.wanted
        adapters = self.engine.scheduler.adapters
        assert self.engine.pool.free + adapters.idle_pages == self.engine.pool.size

    # --------------------------------------------------------------------------- what holds

    def check(self) -> None:
        wrong = self._wrong or self._contents.wrong
        if wrong is not None:
            raise wrong
        self.engine.check_integrity()
        self._check_totals()
        scheduler = self.engine.scheduler
        assert len(scheduler.running) <= scheduler.limits.running
        there = {sequence.id for sequence in (*scheduler.waiting, *scheduler.running)}
        assert there == set(self.wanted)
        in_turn = scheduler.policy.first(len(scheduler.waiting), 0.0, scheduler.running)
        assert sorted(one.number for one in in_turn) == sorted(o.number for o in scheduler.waiting)
        for sequence in (*scheduler.waiting, *scheduler.running):
            assert len(sequence.generated) == self.came[sequence.id]

    def _check_totals(self) -> None:
        """What is counted of adapters, event by event, is what the scheduler has."""
        scheduler, counted = self.engine.scheduler, self.engine.totals.adapters
        waiting = [one.request.adapter for one in (*scheduler.waiting, *scheduler.preparing)]
        running = [one.request.adapter for one in scheduler.running]
        for adapters, counts in ((waiting, counted.waiting), (running, counted.running)):
            assert counts == Counter(one.name for one in adapters if one is not None)
        assert counted.resident == self.resident

    def _listen(self, event: Event) -> None:
        """Keep what is wrong with an event for `check`: the log drops a listener that raises."""
        try:
            self._hear(event)
        except AssertionError as error:
            self._wrong = self._wrong or error

    def _hear(self, event: Event) -> None:
        kind, subject = event.kind, event.subject
        assert event.time_s >= self.time_s, "time goes back"
        self.time_s = event.time_s
        if subject in "pqrstu":
            # Of two versions of an adapter both may be there.
            self.resident[subject] += {Kind.PAGED_IN: 1, Kind.EVICTED: -1}[kind]
            assert self.resident[subject] >= 0
            return
        last = self.last.get(subject)
        follows = JOBS if subject.startswith("job") else REQUESTS
        assert kind in follows.get(last, ()), f"{subject}: {last} → {kind}"
        self.last[subject] = kind
        if follows is JOBS:
            return
        if kind is Kind.TOKEN:
            found = event.details.get("cached_tokens", 0)
            assert isinstance(found, int)
            self.cached += found
            self.came[subject] += 1
            assert self.came[subject] <= self.wanted[subject]
        if kind is Kind.FINISHED:
            self.finished += 1
            assert self.came[subject] == self.wanted[subject], "a token is lost"
        if kind in (Kind.FINISHED, Kind.CANCELLED, Kind.TIMED_OUT, Kind.FAILED):
            del self.wanted[subject]
