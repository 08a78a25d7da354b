"""The engine's loop: serves requests and trains adapters over one program, step by step.

Each step serves what the scheduler plans and ends with its tokens. Before them it runs parts of
jobs, and beside them finetuning windows, as much as `sharing` allows; on GPUs the parts run on a
stream of their own, beside the forward. Everything that happens is in the event log.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from collections.abc import Sequence as List

from pcg.errors import GenerationError, PcgError, as_pcg_error
from pcg.runtime.adapters.cache import ServedAdapter
from pcg.runtime.engine.clock import Clock
from pcg.runtime.engine.device import Device
from pcg.runtime.engine.jobs import Job, Jobs, PartGroup
from pcg.runtime.engine.latency import Latencies
from pcg.runtime.engine.options import EngineOptions
from pcg.runtime.engine.scheduler import Scheduler
from pcg.runtime.engine.sharing import CoServing, Sharing, Step
from pcg.runtime.engine.suspects import Suspects
from pcg.runtime.engine.taken import Taken
from pcg.runtime.memory.pool import PagePool
from pcg.runtime.metrics.events import KEPT_EVENTS, Event, EventLog, Kind
from pcg.runtime.metrics.totals import Totals
from pcg.runtime.model.load import Load
from pcg.runtime.requests.deadlines import Deadlines
from pcg.runtime.requests.groups import Groups
from pcg.runtime.requests.request import Chunk, Request
from pcg.runtime.requests.sequence import Sequence, State
from pcg.runtime.requests.step_plan import StepPlan
from pcg.runtime.requests.step_results import StepResults
from pcg.runtime.training.work_units import Forward, Part


class EngineLoop:
    """Serves and trains on a device, real or simulated; called by one thread.

    Attributes:
        submitted: number of requests so far, which is the index of the next one's chunks.
        worked: True if the last step ran anything.
        awaited: tells if somebody waits; a step that serves nothing then ends between two parts.
        meanwhile: called once a step is planned: before its work, or behind a launch of that.
    """

    def __init__(
        self, device: Device, scheduler: Scheduler, clock: Clock, options: EngineOptions
    ) -> None:
        self.device = device
        self.scheduler = scheduler
        self.clock = clock
        self.log = EventLog(KEPT_EVENTS) if options.log is None else options.log
        self.totals = Totals(self.log)
        self.sharing: Sharing = CoServing() if options.sharing is None else options.sharing
        self.worked = False
        self.awaited: Callable[[], bool] | None = None
        self.meanwhile: Callable[[], None] | None = None
        self._latencies: Latencies | None = None
        if options.latencies is not None:
            self.learn(options.latencies)
        pages = int(options.job_share * scheduler.pool.size)
        log, now_s, known = self.log, clock.now_s, weakref.ref(device)

        # These refer to no engine, and weakly to the device, so that its memory is freed at once.
        def note(kind: Kind, subject: str, **details: object) -> None:
            log.add(Event(now_s(), kind, subject, details))

        def evict(adapter: ServedAdapter) -> None:
            device = known()
            if device is not None:
                device.evict(adapter)
            note(Kind.EVICTED, adapter.name)

        self._note = note
        self.jobs = Jobs(scheduler, device.cache, pages, note)
        self._suspects = Suspects()
        self._beside: list[PartGroup] = []
        self.submitted = 0
        self._chunks: list[Chunk] = []
        self._sequences: dict[str, Sequence] = {}
        self._groups = Groups()
        self._deadlines = Deadlines()

        scheduler.on_preempted = lambda sequence: note(Kind.PREEMPTED, sequence.id)
        scheduler.adapters.on_page_in = lambda adapter: note(Kind.PAGED_IN, adapter.name)
        scheduler.adapters.on_evict = evict
        scheduler.prefetch, scheduler.is_copying = device.prefetch, device.is_copying
        scheduler.copy_page = device.copy_page

    def learn(self, latencies: Latencies) -> None:
        """Plan by latencies, and correct them by the times of steps."""
        self._latencies = latencies
        latencies.keep(self.scheduler.limits.tpot_percentile)
        self.scheduler.forward = self.scheduler.pace = latencies.forward

    @property
    def pool(self) -> PagePool:
        return self.scheduler.pool

    @property
    def is_idle(self) -> bool:
        """True if there is nothing to serve, nothing to train, and no chunk to return."""
        trains = self.sharing.trains and self.jobs.unpaused
        return self.scheduler.is_empty and not (self._chunks or trains)

    # ------------------------------------------------------------------------------- requests

    def submit(self, request: Request, submitted_s: float | None = None) -> str:
        """Submit a request; returns its id. `step` returns its chunks.

        Args:
            submitted_s: when it came, on the engine's clock, if a step held it up; None for now.
        Raises:
            GenerationError: the model cannot run it, there is a request with its id, or the machine
                cannot keep its SLOs.
            OutOfMemoryError: the engine will never have the memory for it.
            QueueFullError: too much waits already.
        """
        self.scheduler.limits.check(request)
        number, self.submitted = self.submitted, self.submitted + 1
        now = self.clock.now_s() if submitted_s is None else submitted_s
        sequence = self.device.open(request, number)
        opened = [sequence, *sequence.followers]
        for one in opened:
            one.submitted_s = now
            self.scheduler.limits.promise(one)
            if self._sequences_of(one.id):
                raise GenerationError(
                    f"there is a request {one.id!r} already; give each its own request_id, or none"
                )
        self.log.add(Event(now, Kind.SUBMITTED, sequence.id, sequence.described()))
        error = self.scheduler.refusal(sequence, self.jobs.most_pages if self.jobs else 0)
        if error is not None:
            sequence.state = State.REFUSED
            self._note(Kind.REFUSED, sequence.id, reason=str(error))
            raise error
        self.log.add(*(Event(now, Kind.SUBMITTED, f.id, f.described()) for f in sequence.followers))
        self._sequences |= {one.id: one for one in opened}
        self._groups.add(sequence)
        if request.timeout_s is not None:
            self._deadlines.add(now + request.timeout_s, opened)
        self.scheduler.add(sequence)
        return sequence.id

    def cancel(self, request: str, kind: Kind = Kind.CANCELLED) -> None:
        """End a request by its id, if there is one; `kind` may be TIMED_OUT."""
        self._end(self._sequences_of(request), State(kind.value), kind)

    def _sequences_of(self, request: str) -> List[Sequence]:
        """Return a request's continuations; none if it is not here any more."""
        sequence = self._sequences.get(request) or self._groups.first(request)
        return () if sequence is None else self._groups.of(sequence)

    def forget(self, adapter: ServedAdapter, *, is_gone: bool = True) -> None:
        """Drop what is cached of an adapter that changed; running requests go on with it alone."""
        self.scheduler.forget(adapter, is_gone=is_gone)
        if is_gone and not self.scheduler.adapters.has(adapter):
            self.device.evict(adapter)

    # ------------------------------------------------------------------------------- jobs

    def pause_job(self, name: str) -> None:
        """Pause a job after its latest unit; it keeps its pages."""
        self.jobs.pause(name)

    def resume_job(self, name: str) -> None:
        """Resume a paused job."""
        self.jobs.resume(name)

    def cancel_job(self, name: str) -> None:
        """End a job now; its adapter is as after the last complete step."""
        self.jobs.cancel(name)

    # ------------------------------------------------------------------------------- a step

    def step(self) -> list[Chunk]:
        """Run one step; returns the new chunks, and those of requests that ended since the last."""
        now = self.clock.now_s()
        self._time_out(now)
        suspect, plan = self._plan(now)
        for sequence in plan.admitted:
            self._note(Kind.ADMITTED, sequence.id)
        step = Step.of(plan, self.scheduler.limits, self._latencies, self.awaited)
        self.sharing.begin(step)
        # How many parts fit beside a forward is known by latencies.
        is_beside = step.is_served and None not in (self.device.side, self._latencies)
        if step.is_served and not is_beside:
            self._parts(step, now)
        step.elapsed_s = self.clock.now_s() - now
        windows = self._windows(step, suspect)
        if step.load.tokens:
            started = self.clock.now_s()
            try:
                if self.meanwhile is not None and self.device.side is None:
                    self.meanwhile()
                end = self.device.start(plan.chunks, [(unit, count) for _, unit, count in windows])
                if is_beside:
                    self._parts_beside(step, [job for job, _, _ in windows])
                if self.meanwhile is not None and self.device.side is not None:
                    self.meanwhile()
                results = end()
            except BaseException as error:
                # Not the present time, for which all ranks would have to ask: some did not fail.
                for one in self.scheduler.abandon():
                    self.log.add(Event(started, Kind.PREEMPTED, one.id))
                if not (self.device.fails_alike and isinstance(error, Exception)):
                    raise
                jobs: list[Sequence | Job] = [job for job, _, _ in windows]
                self._isolate([*(one for one, _ in plan.chunks), *jobs], error)
                return self._taken_chunks()
            took = self.clock.now_s() - started
            is_paced = self.scheduler.policy.is_paced and not plan.has_prompts
            if self._latencies is None and plan.chunks and (self.jobs.layers or is_paced):
                self._latencies = Latencies.guessed(step.load, took, self.jobs.layers or 1)
                self.scheduler.pace = self._latencies.forward
            step.ran_forward(took)
            self._join(step)
            self._accept(plan, results, step.load.tokens - plan.tokens)
            for job in self.jobs.unpaused:
                self.jobs.settle(job)
        self._suspects.ran(suspect, has_tokens=bool(plan.chunks))
        if not step.is_served:
            self._parts(step, now)
        self.worked = bool(step.load.tokens or step.units)
        return self._taken_chunks()

    def _taken_chunks(self) -> list[Chunk]:
        chunks, self._chunks = self._chunks, []
        return chunks

    def _plan(self, now: float) -> tuple[Sequence | Job | None, StepPlan]:
        """Return what has to run alone, if anything, and what is served."""
        suspect, plan = self._suspects.current, StepPlan()
        if isinstance(suspect, Sequence):
            plan = self.scheduler.plan_alone(suspect, now)
            if not plan.chunks:  # there is no room for it now
                self._suspects.ran(suspect, has_tokens=False)
                suspect = None
        if suspect is None and self.sharing.serves(self.jobs.have_work):
            plan = self.scheduler.plan(now)
        return suspect, plan

    def _isolate(self, ran: List[Sequence | Job], error: Exception) -> None:
        """Drop what failed alone, or run everything alone that ran in a failed step.

        The error is raised again where the device runs nothing any more.
        """
        self.worked = True
        if len(ran) > 1:
            self._suspects.add(ran)
            return
        try:
            self.device.check_alive()
        except Exception:
            raise error from None
        if isinstance(ran[0], Sequence):
            self._fail(ran[0], error)
        else:
            ran[0].fail(error)
            self.jobs.settle(ran[0])

    def _fail(self, one: Sequence, error: Exception) -> None:
        caused = as_pcg_error(error, one.id, GenerationError)
        self._end(self._groups.of(one), State.FAILED, Kind.FAILED, caused)

    def _time_out(self, now: float) -> None:
        for late in self._deadlines.passed(now):
            self._end(late, State.TIMED_OUT, Kind.TIMED_OUT)
        for sequence, error in self.scheduler.queue_prepared():
            self._fail(sequence, error)
        for sequence in self.scheduler.policy.hopeless(now):
            self._end(self._groups.of(sequence), State.TIMED_OUT, Kind.TIMED_OUT)

    def _end(
        self, request: List[Sequence], state: State, kind: Kind, error: PcgError | None = None
    ) -> None:
        """End a request: those of its continuations that are left."""
        reason = {} if error is None else {"reason": str(error)}
        not_begun = [other for one in request for other in one.followers]
        for one in request:
            if one.is_over:
                continue
            if one not in not_begun:
                self.scheduler.drop(one)
            del self._sequences[one.id]
            self._chunks += self._groups.handed_out(one, one.end(state, error))
            self._note(kind, one.id, tokens=len(one.generated), **reason)

    def _accept(self, plan: StepPlan, results: StepResults, trained: int) -> None:
        now = self.clock.now_s()
        self.scheduler.policy.served(plan.chunks)
        taken = Taken(now, self._groups, self.scheduler, self.totals)
        for sequence, count in plan.chunks:
            sequence.cached += count
            taken.give(sequence, results)
        self._chunks += taken.chunks
        taken.log(self.log, plan.tokens, trained)
        for sequence, reason in taken.ended:
            self.scheduler.drop(sequence)
            del self._sequences[sequence.id]
            self._note(Kind.FINISHED, sequence.id, reason=reason, tokens=len(sequence.generated))
        for sequence, cause in taken.failed.items():
            self._fail(sequence, cause)

    # ------------------------------------------------------------------------------- finetuning

    def _windows(
        self, step: Step, suspect: Sequence | Job | None
    ) -> list[tuple[Job, Forward, int]]:
        found: list[tuple[Job, Forward, int]] = []
        for job, unit in self.jobs.forward():
            if suspect not in (None, job):
                continue
            tokens = unit.whole.fitting(min(unit.remaining, self.sharing.forward(step, unit)))
            if tokens > 0:
                found.append((job, unit, tokens))
                step.load += Load.of_window(tokens, unit.context)
                job.tokens += tokens
        return found

    def _parts(self, step: Step, started: float) -> None:
        """Run parts of jobs before the forward of what the step serves, if it does."""
        ahead_s = step.ahead_s() if step.is_served else 0.0
        step.elapsed_s = self.clock.now_s() - started
        while not step.is_over and (group := self.jobs.next_group(self.sharing, step, ahead_s)):
            try:
                took = self._run(group.parts, started + step.elapsed_s)
            except Exception as error:
                self._fail_parts(group, error)
                return
            before_s = step.elapsed_s
            self._advance(step, group)
            step.elapsed_s = self.clock.now_s() - started
            self._observe(step, group, took, step.elapsed_s - before_s)

    def _fail_parts(self, group: PartGroup, error: Exception) -> None:
        if not self.device.fails_alike:
            raise error
        self.jobs.failed(group, error)

    def _run(self, parts: List[Part], now: float) -> float:
        side = self.device.side
        if side is None:
            self.device.run_parts(parts)
            return self.clock.now_s() - now
        side.begin()
        with side.beside(), side.timed():
            self.device.run_parts(parts)
        return sum(side.join())

    def _parts_beside(self, step: Step, busy: List[Job]) -> None:
        """Run parts of jobs beside the step's forward, by their predicted time.

        Jobs that are busy in the forward have none: they would read what it still computes.

        Observations are of the time that both take when they run at once, and so are predictions.
        """
        side, latencies = self.device.side, self._latencies
        assert side is not None
        assert latencies is not None
        spent_s = step.ahead_s()
        with side.beside():
            while group := self.jobs.next_group(self.sharing, step, spent_s, busy):
                try:
                    with side.timed():
                        self.device.run_parts(group.parts)
                except Exception as error:
                    self._fail_parts(group, error)
                    return
                self._beside.append(group)
                spent_s += latencies.of(group.phase).bound_s(group.load)
                self._advance(step, group)

    def _join(self, step: Step) -> None:
        if self._beside:
            assert self.device.side is not None
            groups, self._beside = self._beside, []
            for group, took in zip(groups, self.device.side.join(), strict=True):
                self._observe(step, group, took, took)

    def _observe(self, step: Step, group: PartGroup, took: float, with_update_s: float) -> None:
        step.ran_parts(group.phase, group.load, took, with_update_s)
        self.sharing.ran(step, with_update_s)

    def _advance(self, step: Step, group: PartGroup) -> None:
        step.units += len(group.parts)
        for job, tokens in zip(group.jobs, group.tokens, strict=True):
            job.tokens, job.held = job.tokens + tokens, 0
            job.advance()
            self.jobs.settle(job)

    def check_integrity(self) -> None:
        """Raise an AssertionError if a page, a sequence or a job is lost, or in two places."""
        self.scheduler.check_integrity()
        here = self.scheduler.everyone
        there = {id(each) for one in here for each in (one, *one.followers)}
        assert there == {id(sequence) for sequence in self._sequences.values()}
        self.jobs.check_integrity()
