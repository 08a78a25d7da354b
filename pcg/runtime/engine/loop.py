"""The engine's loop: serves requests and trains adapters over one program, step by step.

Each step serves what the scheduler plans and ends with its tokens. Before them it runs parts of
jobs, and beside them finetuning windows, as much as `sharing` allows; on GPUs the parts run on a
stream of their own, beside the forward. Where the device runs beside the host, the next step begins
before the tokens of this one are read (`steps/flight.py`). Everything that happens is in the event
log.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

from pcg.errors import GenerationError, PcgError
from pcg.peft.adapter import Adapter
from pcg.runtime.adapters.cache import ServedAdapter
from pcg.runtime.engine.clock import Clock
from pcg.runtime.engine.device import Device
from pcg.runtime.engine.jobs import Job, Jobs
from pcg.runtime.engine.latency import Latencies
from pcg.runtime.engine.options import EngineOptions
from pcg.runtime.engine.scheduler import Scheduler
from pcg.runtime.engine.sharing import CoServing, Sharing, Step
from pcg.runtime.engine.sharing.step import Refusal
from pcg.runtime.engine.steps.flight import AHEAD, Flight
from pcg.runtime.engine.steps.job_parts import JobParts
from pcg.runtime.engine.steps.open_requests import OpenRequests
from pcg.runtime.engine.suspects import Owner, Suspects, owner_of
from pcg.runtime.memory.pool import PagePool
from pcg.runtime.metrics.events import KEPT_EVENTS, Event, EventLog, Kind
from pcg.runtime.metrics.totals import Totals
from pcg.runtime.model.load import Load
from pcg.runtime.requests.request import Chunk, Request
from pcg.runtime.requests.sequence import Sequence, State
from pcg.runtime.requests.step_plan import StepPlan
from pcg.runtime.training.work_units import Forward, Phase

_LOG = logging.getLogger("pcg.engine")

_RETRIES = 3
"""Steps in a row that may fail before anything ran, also none of the suspects."""


class EngineLoop:
    """Serves and trains on a device, real or simulated; called by one thread.

    Attributes:
        submitted: number of requests so far, which is the index of the next one's chunks.
        worked: True if the last step ran anything.
        is_broken: True if an error came out of a step, after which nothing can be relied on.
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
        self._is_guessed = False
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
        self._alone: Sequence | Job | None = None
        self._ran: list[Sequence | Job] = []
        self._failures = 0
        self._is_half_changed = self.is_broken = False
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
        self._latencies, self._is_guessed = latencies, False
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
            one.times.submitted_s = now
            self.scheduler.limits.promise(one)
            if self.requests.of(one.id):
                raise GenerationError(
                    f"there is a request {one.id!r} already; give each its own request_id, or none"
                )
        self.log.add(Event(now, Kind.SUBMITTED, sequence.id, sequence.described()))
        error: GenerationError | None = self._suspects.why_broken(request)
        if error is None:
            error = self.scheduler.refusal(sequence, self.jobs.pages.most if self.jobs else 0)
        if error is not None:
            sequence.state = State.REFUSED
            self._note(Kind.REFUSED, sequence.id, reason=str(error))
            raise error
        self.log.add(*(Event(now, Kind.SUBMITTED, f.id, f.described()) for f in sequence.followers))
        with self._whole():
            due_s = None if request.timeout_s is None else now + request.timeout_s
            try:
                self.requests.add(sequence, due_s)
                self.scheduler.add(sequence)
            except BaseException:
                self.requests.remove(sequence)
                raise
        return sequence.id

    def cancel(self, request: str, kind: Kind = Kind.CANCELLED) -> None:
        """End a request by its id, if there is one; `kind` may be TIMED_OUT."""
        with self._whole():
            self.requests.end(self.requests.of(request), State(kind.value), kind)

    def forget(self, adapter: ServedAdapter, *, is_gone: bool = True) -> None:
        """Drop what is cached of an adapter that changed; running requests go on with it alone."""
        self._suspects.forgive(adapter)
        with self._whole():
            self.scheduler.forget(adapter, is_gone=is_gone)
            if is_gone and not self.scheduler.adapters.has(adapter):
                self.device.evict(adapter)

    # ------------------------------------------------------------------------------- jobs

    def add_job(self, job: Job) -> Job:
        """Run a job from now on. PcgError: there is one of its name."""
        limits, latencies = self.scheduler.limits, self._latencies
        if latencies is not None and limits.tpot_slo_s is not None:
            decode_s = latencies.forward.seconds(Load(1, sampled=1))
            least = Load.of(limits.least_chunk, 0)
            takes_s, left_s = latencies.backward.seconds(least), limits.tpot_slo_s - decode_s
            if takes_s > left_s:
                job.refusal = Refusal(least.tokens, Phase.BACKWARD, takes_s, left_s)
                _LOG.warning(
                    "job %r trains while nothing is served, and rarely beside requests: %s",
                    job.name,
                    job.refusal.described(limits),
                )
        return self.jobs.add(job)

    def drop_job(self, job: Job) -> None:
        """End a job that was made and not added."""
        job.cancel()

    def interrupt_job(self, name: str) -> None:
        """End a job after the step under way, with a checkpoint where these are kept."""
        with self._whole():
            self.jobs.interrupt(name)

    def pause_job(self, name: str) -> None:
        """Pause a job after its latest unit; it keeps its pages."""
        self.land()
        with self._whole():
            self.jobs.pause(name)

    def resume_job(self, name: str) -> None:
        """Resume a paused job."""
        self.jobs.resume(name)

    def cancel_job(self, name: str) -> None:
        """End a job now; its adapter is as after the last complete step."""
        self.land()
        with self._whole():
            self.jobs.cancel(name)

    # ------------------------------------------------------------------------------- a step

    def step(self) -> list[Chunk]:
        """Run one step; returns the new chunks, and those of requests that ended since the last.

        Where the device runs ahead, the chunks are those of the step before.
        """
        with self._isolating():
            if self._acts:
                self.land()
            self._is_stepping = True
            self._step()
        return self.requests.take_chunks()

    @contextmanager
    def _isolating(self) -> Iterator[None]:
        """End the owner of an error, and nothing else."""
        self._alone, self._ran = None, []
        try:
            yield
            if self._is_half_changed:
                self._restart()
            self._failures = 0 if self._alone is None else min(self._failures, 1)
        except BaseException as error:
            self.is_broken = True
            self._isolate(error)
            self.is_broken = False
        finally:
            self._is_stepping, self.jobs.only = False, None

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
        step.began_s = now
        self.jobs.pass_step()
        self.sharing.begin(step)
        # How many parts fit beside a forward is known by latencies.
        is_beside = (
            step.is_served
            and None not in (self.device.side, self._latencies)
            and bool(self.jobs or self.parts.guests)
        )
        if step.is_served and not is_beside:
            self.parts.run(self.device, self.sharing, step, now)
        begins_s = now if before is None else max(now, before.due_s)
        step.elapsed_s = max(0.0, self.clock.latest_s() - begins_s)
        windows = self.parts.windows(self.sharing, step, suspect)
        if not step.load.tokens:
            self._land("nothing served")
            self._suspects.ran(suspect, has_tokens=False)
        else:
            self._run(step, plan, suspect, windows, begins_s, is_beside)
        if not step.is_served:
            self.parts.run(self.device, self.sharing, step, now)
        if self.jobs:
            used = self.jobs.used()  # idle time is nobody's share
            if step.is_served:
                self.scheduler.policy.trained(used)
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
    ) -> None:
        """Start a step, and read the one before; read this one, too, if the device is not ahead."""
        jobs, now = [job for job, _, _ in windows], self.clock.latest_s()
        why = self._why_first(None, step.is_served) if self.device.is_ahead else "never ahead"
        is_read_now = bool(why)
        readings = self.jobs.readings
        self._ran = [*(one for one, _ in plan.chunks), *jobs]
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
        if jobs or step.units:
            most = step.units + len(jobs) * self.device.layers
            self.parts.record(most, flight.due_s if step.is_served else math.inf)
        if is_read_now:
            self._read(flight, why)
        else:
            self._flight, step.is_under_way = flight, True
        self._ran = []

    def land(self) -> None:
        """Read the step that is under way, if one is; `step` then returns its chunks.

        Called in a step, by what a job does, it does nothing.
        """
        if self._is_stepping:
            return
        if self._flight is not None:
            with self._isolating():
                self._land("a call")
        while self._acts:
            self._acts[0]()
            self._acts.pop(0)  # once it is done: an error leaves it to the next step

    def when_landed(self, act: Callable[[], None]) -> None:
        """Act while no step is under way: now, or before the next if this is called in a step."""
        self._acts.append(act)
        self.land()

    def _land(self, why: str) -> None:
        if self._flight is not None:
            self._read(self._flight, why)
            self._flight = None

    def _read(self, flight: Flight, why: str) -> None:
        """Wait for a step, and give everyone what it computed."""
        self.reads[why] += 1
        results, step, plan = flight.running.read(), flight.step, flight.plan
        now, begins_s = self.clock.now_s(results.first_ns), max(step.began_s, self._read_s)
        took = flight.took_s(now, self._read_s)
        self._read_s, step.is_under_way = now, False
        self.jobs.readings.read(flight.number)
        if plan.chunks and self._is_to_guess(step, plan, took):
            self._latencies = Latencies.guessed(step.load, took, self.device.layers)
            self.scheduler.pace = self._latencies.forward
            self._is_guessed = True
        step.ran_forward(took, flight.running.is_replayed)
        if self.parts.join(self.device, self.sharing, step):
            self._read_s = self.clock.now_s()  # the next forward begins once both have ended
        step.lasted_s = self._read_s - begins_s
        self.parts.settle(self.device)
        self.requests.accept(flight, results, self.clock.latest_s())
        self._suspects.ran(flight.suspect, has_tokens=bool(plan.chunks))

    def _is_to_guess(self, step: Step, plan: StepPlan, took_s: float) -> bool:
        """Return True if a step is the first to tell how long steps take.

        So is one that took far less than predicted, as where a kernel was compiled in those before.
        """
        if self._latencies is not None:
            return self._is_guessed and took_s < _FAR * self._latencies.forward.seconds(step.load)
        scheduler = self.scheduler
        is_bounded = scheduler.limits.prompt_stretch < math.inf
        is_paced = scheduler.policy.is_paced and not plan.has_prompts
        return is_bounded or is_paced or self.jobs.have_work

    def _plan(self, now: float) -> tuple[Sequence | Job | None, StepPlan]:
        """Return what has to run alone, if anything, and what is served."""
        suspect, plan = self._suspects.current, StepPlan()
        self._alone = suspect
        if suspect is not None:
            self.jobs.only = () if isinstance(suspect, Sequence) else (suspect,)
        if isinstance(suspect, Sequence):
            plan = self.scheduler.plan_alone(suspect, now)
            if not plan.chunks:  # there is no room for it now
                self._suspects.ran(suspect, has_tokens=False)
                suspect = self._alone = self.jobs.only = None
        if suspect is None and self.sharing.serves(self.jobs.have_work):
            plan = self.scheduler.plan(now)
        return suspect, plan

    def _isolate(self, error: BaseException) -> None:
        """Drop what failed alone; else find what has to run alone next.

        What was planned, and ran nothing yet, is planned again: the error may be nobody's. Then
        those are suspects for which the failed function worked, and if the next step fails, too,
        all that were in it.

        The error is raised again where only this rank may have it, where steps fail one after the
        other for nobody, and where the device runs nothing any more.
        """
        scheduler, flight = self.scheduler, self._flight
        ran = list(dict.fromkeys([*([] if flight is None else flight.ran), *self._ran]))
        running = list(scheduler.running)
        self._restart()
        if not (self.device.fails_alike and isinstance(error, Exception)):
            raise error
        self.worked = True
        owner = owner_of(error)
        if self._alone is not None:
            self._drop(self._alone, owner, error)
            return
        self._failures += 1
        suspects: list[Sequence | Job] = []
        if isinstance(owner, Adapter):
            suspects += [one for one in scheduler.waiting if one.request.adapter is owner][:1]
        elif owner is not None:
            suspects.append(owner)
        if self._failures > _RETRIES:  # not even a suspect has run since
            if not suspects:
                raise error
            self._suspects.clear()
            self._drop(suspects[0], owner, error)
            self._failures = 0
            return
        if self._failures > 1 or (ran and not suspects):
            suspects += ran or [*(running or scheduler.waiting)] or [*self.jobs]
        self._suspects.add(suspects)

    def _drop(self, one: Sequence | Job, owner: Owner | None, error: Exception) -> None:
        """Fail what failed alone, or all requests of the adapter that failed."""
        try:
            self.device.check_alive()
        except Exception:
            raise error from None
        if not isinstance(one, Sequence):
            one.fail(error)
            self.jobs.settle(one)
            return
        of_adapter = [one]
        if owner is not None and owner is one.request.adapter:
            self._suspects.condemn(owner, error)
            of_adapter = [each for each in self.scheduler.everyone if each.request.adapter is owner]
        for each in of_adapter:
            self.requests.fail(each, error)

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Rebuild the state that a call left half changed; its caller gets the error."""
        try:
            yield
        except PcgError:
            raise
        except BaseException:
            self._is_half_changed = True
            if not self._is_stepping:
                self._restart()
            raise

    def _restart(self) -> None:
        """Rebuild all state that can be computed again, as a failed call may have changed half.

        Requests keep their tokens, and jobs their units and pages; nothing else is kept.
        """
        self._is_half_changed, self._flight = False, None
        # Not the present time, for which all ranks would have to ask: some did not fail.
        now_s = self.clock.latest_s()
        running = [one for one in self.requests.by_id.values() if one.state is State.RUNNING]
        self.parts.restart()
        self.jobs.restart()
        self.device.reset()
        self.requests.restart(self.jobs.tables)
        for one in running:
            self.log.add(Event(now_s, Kind.PREEMPTED, one.id))

    def check_integrity(self) -> None:
        """Raise an AssertionError if a page, a sequence or a job is lost, or in two places."""
        self.scheduler.check_integrity()
        self.requests.check_integrity()
        self.jobs.check_integrity()


_FAR = 1 / 16
"""A guess is made again where a step takes so much of its prediction; learning corrects less."""
