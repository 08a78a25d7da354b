"""The engine's loop: serves requests and trains adapters over one program, step by step.

Each step serves what the scheduler plans and ends with its tokens. Before them it runs parts of
jobs, and beside them finetuning windows, as much as `sharing` allows; on GPUs the parts run on a
stream of their own, beside the forward. Where the device runs beside the host, the next step begins
before the tokens of this one are read (`steps/flight.py`). Everything that happens is in the event
log.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as List
from contextlib import nullcontext
from functools import partial

from pcg.errors import GenerationError
from pcg.runtime.adapters.cache import ServedAdapter
from pcg.runtime.engine.clock import Clock
from pcg.runtime.engine.device import Device
from pcg.runtime.engine.jobs import Job, Jobs
from pcg.runtime.engine.latency import Latencies
from pcg.runtime.engine.options import EngineOptions
from pcg.runtime.engine.scheduler import Scheduler
from pcg.runtime.engine.sharing import CoServing, Sharing, Step
from pcg.runtime.engine.steps.flight import AHEAD, Flight
from pcg.runtime.engine.steps.job_parts import JobParts
from pcg.runtime.engine.steps.open_requests import OpenRequests
from pcg.runtime.engine.suspects import Suspects
from pcg.runtime.memory.pool import PagePool
from pcg.runtime.metrics.events import KEPT_EVENTS, Event, EventLog, Kind
from pcg.runtime.metrics.totals import Totals
from pcg.runtime.requests.request import Chunk, Request
from pcg.runtime.requests.sequence import Sequence, State
from pcg.runtime.requests.step_plan import StepPlan
from pcg.runtime.training.work_units import Forward


class EngineLoop:
    """Serves and trains on a device, real or simulated; called by one thread.

    Attributes:
        submitted: number of requests so far, which is the index of the next one's chunks.
        worked: True if the last step ran anything.
        parts: what runs the parts of jobs in a step, and the work of guests.
        awaited: tells if somebody waits; a step that serves nothing then ends between two parts.
        requests: those that are here.
        reads: how many steps were read once the next had begun (`AHEAD`), and why others before.
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
        log, now_s, known = self.log, clock.latest_s, weakref.ref(device)

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
        self.parts = JobParts(self.jobs, clock)
        self._flight: Flight | None = None
        self._read_s = -math.inf
        self.submitted = 0
        self.requests = OpenRequests(scheduler, self.log, self.totals, note)
        self.reads: Counter[str] = Counter()
        self._is_stepping = False
        self._acts: list[Callable[[], None]] = []

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
        is_left = self._flight is not None or self.requests.chunks or self._acts or trains
        return self.scheduler.is_empty and not is_left

    @property
    def is_ahead(self) -> bool:
        """True while the device runs a step whose tokens are not read yet."""
        return self._flight is not None

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
            if self.requests.of(one.id):
                raise GenerationError(
                    f"there is a request {one.id!r} already; give each its own request_id, or none"
                )
        self.log.add(Event(now, Kind.SUBMITTED, sequence.id, sequence.described()))
        error = self.scheduler.refusal(sequence, self.jobs.pages.most if self.jobs else 0)
        if error is not None:
            sequence.state = State.REFUSED
            self._note(Kind.REFUSED, sequence.id, reason=str(error))
            raise error
        self.log.add(*(Event(now, Kind.SUBMITTED, f.id, f.described()) for f in sequence.followers))
        self.requests.add(sequence, None if request.timeout_s is None else now + request.timeout_s)
        self.scheduler.add(sequence)
        return sequence.id

    def cancel(self, request: str, kind: Kind = Kind.CANCELLED) -> None:
        """End a request by its id, if there is one; `kind` may be TIMED_OUT."""
        self.requests.end(self.requests.of(request), State(kind.value), kind)

    def forget(self, adapter: ServedAdapter, *, is_gone: bool = True) -> None:
        """Drop what is cached of an adapter that changed; running requests go on with it alone."""
        self.scheduler.forget(adapter, is_gone=is_gone)
        if is_gone and not self.scheduler.adapters.has(adapter):
            self.device.evict(adapter)

    # ------------------------------------------------------------------------------- jobs

    def add_job(self, job: Job) -> Job:
        """Run a job from now on. PcgError: there is one of its name."""
        return self.jobs.add(job)

    def drop_job(self, job: Job) -> None:
        """End a job that was made and not added."""
        job.cancel()

    def interrupt_job(self, name: str) -> None:
        """End a job after the step under way, with a checkpoint where these are kept."""
        self.jobs.interrupt(name)

    def pause_job(self, name: str) -> None:
        """Pause a job after its latest unit; it keeps its pages."""
        self.land()
        self.jobs.pause(name)

    def resume_job(self, name: str) -> None:
        """Resume a paused job."""
        self.jobs.resume(name)

    def cancel_job(self, name: str) -> None:
        """End a job now; its adapter is as after the last complete step."""
        self.land()
        self.jobs.cancel(name)

    # ------------------------------------------------------------------------------- a step

    def step(self) -> list[Chunk]:
        """Run one step; returns the new chunks, and those of requests that ended since the last.

        Where the device runs ahead, the chunks are those of the step before.
        """
        if self._acts:
            self.land()
        self._is_stepping = True
        try:
            self._step()
        finally:
            self._is_stepping = False
        return self.requests.take_chunks()

    def _step(self) -> None:
        is_ahead, before = self.is_ahead, self._flight
        if before is not None and (why := self._why_first(before)):
            self._land(why)
            before = None
        now = self.clock.latest_s()
        self.requests.time_out(now)
        suspect, plan = self._plan(now)
        for sequence in plan.admitted:
            self._note(Kind.ADMITTED, sequence.id)
        step = Step.of(plan, self.scheduler.limits, self._latencies, self.awaited)
        self.sharing.begin(step)
        # How many parts fit beside a forward is known by latencies.
        is_beside = step.is_served and None not in (self.device.side, self._latencies)
        if step.is_served and not is_beside:
            self.parts.run(self.device, self.sharing, step, now)
        begins_s = now if before is None else max(now, before.due_s)
        step.elapsed_s = max(0.0, self.clock.latest_s() - begins_s)
        windows = self.parts.windows(self.sharing, step, suspect)
        if not step.load.tokens:
            self._land("nothing served")
            self._suspects.ran(suspect, has_tokens=False)
        elif not self._run(step, plan, suspect, windows, begins_s, is_beside):
            return
        if not step.is_served:
            self.parts.run(self.device, self.sharing, step, now)
        self.worked = bool(step.load.tokens or step.units or is_ahead)

    def _why_first(self, before: Flight | None, is_served: bool = True) -> str:
        """Return why a step is read before the next is planned; nothing if it need not be."""
        if self._suspects.current is not None:
            return "an error"
        if self.jobs and self._latencies is None:
            return "times unknown"
        if self.jobs and not is_served:
            return "nothing served"
        return "a prompt's end" if before is not None and before.is_read_first else ""

    def _run(
        self,
        step: Step,
        plan: StepPlan,
        suspect: Sequence | Job | None,
        windows: list[tuple[Job, Forward, int]],
        begins_s: float,
        is_beside: bool,
    ) -> bool:
        """Start a step, and read the one before; read this one, too, if the device is not ahead.

        Returns:
            False if one of them failed.
        """
        jobs, now = [job for job, _, _ in windows], self.clock.latest_s()
        why = self._why_first(None, step.is_served) if self.device.is_ahead else "never ahead"
        is_read_now = bool(why)
        readings = self.jobs.readings
        flight: Flight | None = None
        try:
            if self.meanwhile is not None and self.device.side is None:
                self.meanwhile()
            running = self.device.start(plan.chunks, [(unit, count) for _, unit, count in windows])
            takes_s = 0.0 if self._latencies is None else self._latencies.forward.seconds(step.load)
            if not is_read_now:
                readings.begin()
            due_s, number = begins_s + takes_s, readings.begun
            flight = Flight(plan, step, running, suspect, jobs, now, due_s, number)
            self.scheduler.policy.served(plan.chunks)
            if self.meanwhile is not None and self.device.side is not None:
                self.meanwhile()
            if is_after_read := self._flight is not None:
                self._read(self._flight, AHEAD)
                self._flight = None
                step.elapsed_s = max(step.elapsed_s, self.clock.latest_s() - self._read_s)
            running.draw()
            if is_beside:
                if self.meanwhile is not None and is_after_read:
                    self.meanwhile()
                run = partial(self.parts.run_beside, self.device, self.sharing, step)
                with self.jobs.pages.shut() if is_after_read else nullcontext():
                    beside_s = run(self._latencies, jobs)
                flight.expect((self._read_s if is_after_read else begins_s) + takes_s + beside_s)
            if is_read_now:
                self._read(flight, why)
            else:
                self._flight, step.is_under_way = flight, True
        except BaseException as error:
            ran: list[Sequence | Job] = [*(one for one, _ in plan.chunks), *jobs]
            if self._flight is not None and flight is None:
                self._land("an error")
            self._give_up([*([] if self._flight is None else self._flight.ran), *ran], now, error)
            return False
        return True

    def land(self) -> None:
        """Read the step that is under way, if one is; `step` then returns its chunks.

        Called in a step, by what a job does, it does nothing.
        """
        if self._is_stepping:
            return
        self._land("a call")
        acts, self._acts = self._acts, []
        for act in acts:
            act()

    def when_landed(self, act: Callable[[], None]) -> None:
        """Act while no step is under way: now, or before the next if this is called in a step."""
        self._acts.append(act)
        self.land()

    def _land(self, why: str) -> None:
        flight = self._flight
        if flight is None:
            return
        try:
            self._read(flight, why)
        except BaseException as error:
            self._give_up(flight.ran, flight.started_s, error)
        self._flight = None

    def _give_up(self, ran: List[Sequence | Job], started_s: float, error: BaseException) -> None:
        """Put back what runs, as a step failed; what ran in it runs alone next."""
        self._flight = None
        self.jobs.readings.give_up()
        # Not the present time, for which all ranks would have to ask: some did not fail.
        for one in self.scheduler.abandon():
            self.log.add(Event(started_s, Kind.PREEMPTED, one.id))
        if not (self.device.fails_alike and isinstance(error, Exception)):
            raise error
        self._isolate(list(dict.fromkeys(ran)), error)

    def _read(self, flight: Flight, why: str) -> None:
        """Wait for a step, and give everyone what it computed."""
        self.reads[why] += 1
        results, step, plan = flight.running.read(), flight.step, flight.plan
        now = self.clock.now_s(results.first_ns)
        took = flight.took_s(now, self._read_s)
        self._read_s, step.is_under_way = now, False
        self.jobs.readings.read(flight.number)
        is_paced = self.scheduler.policy.is_paced and not plan.has_prompts
        if self._latencies is None and plan.chunks and (self.jobs.layers or is_paced):
            self._latencies = Latencies.guessed(step.load, took, self.jobs.layers or 1)
            self.scheduler.pace = self._latencies.forward
        step.ran_forward(took, flight.running.is_replayed)
        if self.parts.join(self.device, self.sharing, step):
            self._read_s = self.clock.now_s()  # the next forward begins once both have ended
        self.parts.settle(self.device)
        self.requests.accept(flight, results, self.clock.latest_s())
        self._suspects.ran(flight.suspect, has_tokens=bool(plan.chunks))

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
            self.requests.fail(ran[0], error)
        else:
            ran[0].fail(error)
            self.jobs.settle(ran[0])

    def check_integrity(self) -> None:
        """Raise an AssertionError if a page, a sequence or a job is lost, or in two places."""
        self.scheduler.check_integrity()
        self.requests.check_integrity()
        self.jobs.check_integrity()
