"""The engine: one loop that serves requests and trains adapters over one program.

Each step serves what the scheduler plans, runs the finetuning windows that go beside it, and then
backward units of jobs, as much as `sharing` says; on GPUs these run on a stream of their own while
the forward does. What happens stands in the event log.
"""

from __future__ import annotations

import heapq
import weakref
from collections.abc import Callable
from collections.abc import Sequence as List

from pcg.errors import OutOfMemoryError
from pcg.runtime.adapters.cache import ServedAdapter
from pcg.runtime.engine.clock import Clock
from pcg.runtime.engine.device import Device
from pcg.runtime.engine.events import Event, EventLog, Kind, Notes
from pcg.runtime.engine.job import Job
from pcg.runtime.engine.jobs import BackwardGroup, Jobs
from pcg.runtime.engine.latency import Latencies
from pcg.runtime.engine.options import EngineOptions
from pcg.runtime.engine.request import Chunk, Request
from pcg.runtime.engine.scheduler import Scheduler
from pcg.runtime.engine.sequence import Sequence, State
from pcg.runtime.engine.sharing import CoServing, Sharing, Step
from pcg.runtime.engine.step_plan import StepPlan
from pcg.runtime.memory.pool import PagePool
from pcg.runtime.model.load import Load
from pcg.runtime.training.work_units import Backward, Forward

_MOST_RESERVE = 0.25
"""Of the promised time a token, kept at most: one long hold-up is not worth more."""
_RESERVE_KEPT = 0.98
"""What is left of the reserve after a step that needed none of it."""


class EngineLoop:
    """Serves and trains; one thread calls it.

    Attributes:
        scheduler: of what is served.
        jobs: that are not over.
        log: of what happened.
        clock: that everything is timed by.
        sharing: how finetuning goes beside what is served.
        worked: whether the last step ran anything.
    """

    def __init__(
        self,
        device: Device,
        scheduler: Scheduler,
        clock: Clock,
        options: EngineOptions,
    ) -> None:
        """Start with nothing to do.

        Args:
            device: that runs the program.
            scheduler: whose pool has all pages.
            clock: of the device.
            options: the engine's options.
        """
        self.device = device
        self.scheduler = scheduler
        self.clock = clock
        self.log = EventLog() if options.log is None else options.log
        self.sharing: Sharing = CoServing() if options.sharing is None else options.sharing
        self.worked = False
        self._latencies: Latencies | None = None
        if options.latencies is not None:
            self.learn(options.latencies)
        pages = int(options.job_share * scheduler.pool.size)
        self._note = note = Notes(self.log, clock)
        self.jobs = Jobs(scheduler, device.cache, pages, note)
        self._reserve_s = 0.0
        self._beside: list[Load] = []
        self._count = 0
        self._chunks: list[Chunk] = []
        self._sequences: dict[str, Sequence] = {}
        self._timeouts: list[tuple[float, str]] = []

        scheduler.on_preempted = lambda sequence: note(Kind.PREEMPTED, sequence.id)
        scheduler.adapters.on_page_in = lambda adapter: note(Kind.PAGED_IN, adapter.name)
        scheduler.adapters.on_evict = _on_evict(device, note)
        scheduler.prefetch, scheduler.is_copying = device.prefetch, device.is_copying

    def learn(self, latencies: Latencies) -> None:
        """Plan by latencies, and correct them by what steps take."""
        self._latencies = latencies
        self.scheduler.forward = latencies.forward

    @property
    def pool(self) -> PagePool:
        """Of all pages."""
        return self.scheduler.pool

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to serve, nothing to train, and nothing to tell."""
        trains = self.sharing.trains and self.jobs.active
        return not (self.scheduler.waiting or self.scheduler.running or self._chunks or trains)

    # ------------------------------------------------------------------------------- requests

    @property
    def submitted(self) -> int:
        """Requests that came so far; the next one's chunks have this index."""
        return self._count

    def submit(self, request: Request, came_s: float | None = None) -> str:
        """Take a request in; its id. What comes of it is in `step`'s chunks.

        Args:
            request: to serve.
            came_s: when it came, on the engine's clock, where a step held it up; None for now.
        Raises:
            GenerationError: the model cannot run it, or the engine never will.
        """
        number, self._count = self._count, self._count + 1
        sequence = self.device.open(request, number)
        sequence.submitted_s = self.clock.now_s() if came_s is None else came_s
        limits, adapter = self.scheduler.limits, request.adapter
        sequence.ttft_slo_s = request.ttft_slo_s or limits.ttft_slo_s
        sequence.tpot_slo_s = request.tpot_slo_s or limits.tpot_slo_s
        details = {
            "prompt_tokens": len(request.prompt_ids),
            "max_new_tokens": sequence.limit,
            "adapter": None if adapter is None else adapter.name,
            "tenant": request.tenant or None,
            "ttft_slo_s": sequence.ttft_slo_s,
            "tpot_slo_s": sequence.tpot_slo_s,
        }
        self.log.add(Event(sequence.submitted_s, Kind.SUBMITTED, sequence.id, details))
        reserved = self.jobs.most_pages if self.jobs else 0
        reason = self.scheduler.why_never(sequence, reserved)
        if reason is not None:
            sequence.state = State.REFUSED
            self._note(Kind.REFUSED, sequence.id, reason=reason)
            raise OutOfMemoryError(reason)
        self._sequences[sequence.id] = sequence
        if request.timeout_s is not None:
            heapq.heappush(self._timeouts, (sequence.submitted_s + request.timeout_s, sequence.id))
        self.scheduler.add(sequence)
        return sequence.id

    def cancel(self, request: str) -> None:
        """Give a request up, wherever it is; one that is over stays as it is."""
        sequence = self._sequences.get(request)
        if sequence is not None:
            self._give_up(sequence, State.CANCELLED, Kind.CANCELLED)

    def forget(self, adapter: ServedAdapter) -> None:
        """Drop what is kept of an adapter that is removed, replaced or changed.

        Requests that run with it go on; what they compute is shared with none to come.
        """
        self.scheduler.forget(adapter)

    # ------------------------------------------------------------------------------- jobs

    def add_job(self, job: Job) -> Job:
        """Take a finetuning job in.

        Raises:
            PcgError: there is one of that name.
        """
        return self.jobs.add(job)

    def pause_job(self, name: str) -> None:
        """Leave a job as it is after its latest unit; its pages stay."""
        self.jobs.pause(name)

    def resume_job(self, name: str) -> None:
        """Go on with a paused job."""
        self.jobs.resume(name)

    def cancel_job(self, name: str) -> None:
        """End a job now; its adapter is as after the last whole step."""
        self.jobs.cancel(name)

    # ------------------------------------------------------------------------------- a step

    def step(self) -> list[Chunk]:
        """Run one step.

        Returns:
            What came of requests, also of those that were given up since the last step.
        """
        now = self.clock.now_s()
        self._give_up_late(now)
        plan = self.scheduler.plan(now) if self.sharing.serves(self.jobs.have_work) else StepPlan()
        for sequence in plan.admitted:
            self._note(Kind.ADMITTED, sequence.id)
        step = Step(
            self.scheduler.limits,
            self._latencies,
            plan.promised_s,
            plan.slack_s - self._reserve_s,
            plan.load,
            is_served=bool(plan.chunks),
            is_awaited=plan.is_awaited,
        )
        self.sharing.begin(step)
        windows = self._windows(step)
        # Without latencies nobody knows how many go beside a forward.
        is_beside = step.is_served and None not in (self.device.side, self._latencies)
        if step.load.tokens:
            started = self.clock.now_s()
            try:
                end = self.device.start(plan.chunks, windows)
                if is_beside:
                    self._backward_beside(step)
                tokens_sampled = end()
            except BaseException:
                # Over ranks the others may not be asked for the time: they have not failed.
                left = self.scheduler.abandon()
                self.log.add(*(Event(started, Kind.PREEMPTED, one.id) for one in left))
                raise
            took = self.clock.now_s() - started
            if self._latencies is not None:
                self._latencies.forward.observe(step.load, took)
            self._join(step)
            self._accept(plan, tokens_sampled)
            for job in self.jobs.active:
                self.jobs.settle(job)
        if not is_beside:
            self._backward(step, now)
        if plan.promised_s is not None and (windows or step.units):
            self._keep_reserve(plan.promised_s, step, self.clock.now_s() - now)
        self.worked = bool(step.load.tokens or step.units)
        chunks, self._chunks = self._chunks, []
        return chunks

    def _keep_reserve(self, promised_s: float, step: Step, took_s: float) -> None:
        """Keep as much of the slack as steps with finetuning overran what was planned.

        A step is foretold as it is on average, and what follows from a unit, as an optimizer's
        step, is not. A request whose last step overran can make up for it no more.
        """
        over_s = min(took_s - step.seconds(self.sharing.burst), _MOST_RESERVE * promised_s)
        self._reserve_s = max(over_s, _RESERVE_KEPT * self._reserve_s)

    def _give_up_late(self, now: float) -> None:
        while self._timeouts and self._timeouts[0][0] < now:
            _, name = heapq.heappop(self._timeouts)
            if name in self._sequences:
                self._give_up(self._sequences[name], State.TIMED_OUT, Kind.TIMED_OUT)
        queue = self.scheduler.queue(now)
        for sequence in list(self.scheduler.policy.hopeless(queue)):
            self._give_up(sequence, State.TIMED_OUT, Kind.TIMED_OUT)

    def _give_up(self, sequence: Sequence, state: State, kind: Kind) -> None:
        self.scheduler.drop(sequence)
        del self._sequences[sequence.id]
        self._chunks.append(sequence.give_up(state))
        self._note(kind, sequence.id)

    def _accept(self, plan: StepPlan, tokens: List[int]) -> None:
        now = self.clock.now_s()
        self.scheduler.policy.served(plan.chunks)
        firsts: list[Event] = []
        others: list[str] = []
        ended: list[tuple[Sequence, str]] = []
        for (sequence, count), token in zip(plan.chunks, tokens, strict=True):
            sequence.cached += count
            if sequence.cached < sequence.length:
                continue
            if sequence.first_token_s is None:
                sequence.first_token_s = now
                details = {"count": 1, "cached_tokens": sequence.found}
                firsts.append(Event(now, Kind.TOKEN, sequence.id, details))
            else:
                others.append(sequence.id)
            chunk = sequence.accept(token)
            self._chunks.append(chunk)
            if chunk.completion is not None:
                ended.append((sequence, chunk.completion.finish_reason))
        self.log.add_tokens(now, others)
        self.log.add(*firsts)
        for sequence, reason in ended:
            self.scheduler.drop(sequence)
            del self._sequences[sequence.id]
            self._note(Kind.FINISHED, sequence.id, reason=reason)

    # ------------------------------------------------------------------------------- finetuning

    def _windows(self, step: Step) -> list[tuple[Forward, int]]:
        """Finetuning tokens that go forward in the step, of the jobs whose turn it is."""
        found: list[tuple[Forward, int]] = []
        for job, unit in self.jobs.forward():
            tokens = min(unit.remaining, self.sharing.forward(step, unit))
            if tokens > 0:
                found.append((unit, tokens))
                step.load += Load.of_window(tokens, unit.context)
                job.tokens += tokens
        return found

    def _backward(self, step: Step, started: float) -> None:
        """Run backward units of the jobs in turn while there is room for them in the step."""
        while group := self._next_group(step, self.clock.now_s() - started):
            self._ran(step, group.load, self._back(group.units, self.clock.now_s()))
            self._go_on(step, group)

    def _next_group(self, step: Step, elapsed_s: float) -> BackwardGroup | None:
        """As many of the units that can run together as there is room for; None for none."""
        group = BackwardGroup()
        for job, unit in self.jobs.backward():
            if not self.sharing.backward(step, group.load + unit.load, elapsed_s):
                break
            group.add(job, unit)
        return group if group.jobs else None

    def _back(self, units: List[Backward], now: float) -> float:
        """Run backward units to their end; the seconds that they took."""
        side = self.device.side
        if side is None:
            self.device.back(units)
            return self.clock.now_s() - now
        side.begin()
        with side.beside(), side.timed():
            self.device.back(units)
        return sum(side.join())

    def _backward_beside(self, step: Step) -> None:
        """The same beside the step's forward, where the device can, by what it is foretold to take.

        What both take when they run at once is what is observed, so it is foretold as well.
        """
        side, latencies = self.device.side, self._latencies
        assert side is not None
        assert latencies is not None
        spent_s = latencies.forward.seconds(step.load)
        with side.beside():
            while group := self._next_group(step, spent_s):
                with side.timed():
                    self.device.back(group.units)
                self._beside.append(group.load)
                spent_s += latencies.backward.seconds(group.load)
                self._go_on(step, group)

    def _join(self, step: Step) -> None:
        """Wait for what ran beside the forward."""
        if self._beside:
            assert self.device.side is not None
            loads, self._beside = self._beside, []
            for load, took in zip(loads, self.device.side.join(), strict=True):
                self._ran(step, load, took)

    def _ran(self, step: Step, load: Load, took: float) -> None:
        if self._latencies is not None:
            self._latencies.backward.observe(load, took)
        self.sharing.ran(step, took)

    def _go_on(self, step: Step, group: BackwardGroup) -> None:
        """Bring jobs to what follows their units."""
        step.units += len(group.units)
        for job, tokens in zip(group.jobs, group.tokens, strict=True):
            job.tokens += tokens
            job.advance()
            self.jobs.settle(job)

    # ------------------------------------------------------------------------------- the rest

    def check_integrity(self) -> None:
        """AssertionError: a page, a sequence or a job is lost, or in two places."""
        self.scheduler.check_integrity()
        there = {id(s) for s in (*self.scheduler.waiting, *self.scheduler.running)}
        assert there == {id(sequence) for sequence in self._sequences.values()}
        self.jobs.check_integrity()


def _on_evict(device: Device, note: Notes) -> Callable[[ServedAdapter], None]:
    # The device knows the adapters' pages; memory that it has is free once nobody knows it.
    known = weakref.ref(device)

    def evict(adapter: ServedAdapter) -> None:
        device = known()
        if device is not None:
            device.evict(adapter)
        note(Kind.EVICTED, adapter.name)

    return evict
