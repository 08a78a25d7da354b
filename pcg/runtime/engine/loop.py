"""The engine's loop: serves requests and trains adapters over one program, step by step.

Each step serves the scheduler's plan and ends with its tokens. It also runs parts of jobs before
the forward, and finetuning windows within it, as much as `sharing` allows; on GPUs the parts run on
a second stream during the forward. Where the device runs in parallel to the host, the next step is
launched before the tokens of this step are read (`running.py`). All events are logged.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from pcg.errors import GenerationError, PcgError
from pcg.peft.adapter import Adapter
from pcg.runtime.adapters.cache import ServedAdapter
from pcg.runtime.admission.latency import Latencies
from pcg.runtime.engine.device.clock import Clock
from pcg.runtime.engine.device.device import Device
from pcg.runtime.engine.options import EngineOptions
from pcg.runtime.engine.scheduling.co_serving import CoServing
from pcg.runtime.engine.scheduling.job_parts import JobParts, Window
from pcg.runtime.engine.scheduling.jobs import Job, Jobs
from pcg.runtime.engine.scheduling.open_requests import OpenRequests
from pcg.runtime.engine.scheduling.running import AHEAD, Running
from pcg.runtime.engine.scheduling.scheduler import Scheduler
from pcg.runtime.engine.scheduling.work import Refusal, Sharing, Work
from pcg.runtime.engine.suspects import Owner, Suspects, owner_of
from pcg.runtime.memory.pool import PagePool
from pcg.runtime.metrics.events import KEPT_EVENTS, Event, EventLog, Kind
from pcg.runtime.metrics.totals import Totals
from pcg.runtime.requests.request import Chunk, Request
from pcg.runtime.requests.sequence import Sequence, State
from pcg.runtime.requests.step import Load, Plan
from pcg.runtime.training.work_units import Phase

_LOG = logging.getLogger("pcg.engine")

_RETRIES = 3
"""Number of consecutive steps that may fail before any work ran."""


class EngineLoop:
    """Serves and trains on a device, real or simulated; called by one thread.

    Attributes:
        submitted: number of requests so far, and the index of the next request's chunks.
        worked: True if the last step ran anything.
        is_broken: True if a step raised an error and the state of the engine is undefined.
        awaited: returns True if a caller waits; a step that serves nothing then ends between parts.
        requests: the open requests.
        reads: number of steps by the reason for reading them before the next launch, or `AHEAD`.
        meanwhile: called in each step, before the forward or, on GPUs, after its launch.
    """

    def __init__(
        self, device: Device, scheduler: Scheduler, clock: Clock, options: EngineOptions
    ) -> None:
        self.device = device
        self.scheduler = scheduler
        self.clock = clock
        self.log = EventLog(KEPT_EVENTS) if options.log is None else options.log
        self.totals = Totals(self.log)
        self.worked = False
        self.awaited: Callable[[], bool] | None = None
        self.meanwhile: Callable[[], None] | None = None
        self._latencies: Latencies | None = None
        self._is_guessed = False
        if options.latencies is not None:
            self.learn(options.latencies)
        log, now_s = self.log, clock.latest_s

        # The closure holds no engine, so that dropping the engine frees device memory immediately.
        def note(kind: Kind, subject: str, **details: object) -> None:
            log.add(Event(now_s(), kind, subject, details))

        self._note = note
        scheduler.attach(device, note)
        self._suspects = Suspects()
        self._alone: Sequence | Job | None = None
        self._ran: list[Sequence | Job] = []
        self._failures = 0
        self._is_half_changed = self.is_broken = False
        self._options = options
        self._parts: JobParts | None = None
        self._running: Running | None = None
        self._read_s = -math.inf
        self.submitted = 0
        self.requests = OpenRequests(scheduler, self.log, self.totals, note)
        self.reads: Counter[str] = Counter()
        self._is_stepping = False
        self._acts: list[Callable[[], None]] = []

    def learn(self, latencies: Latencies) -> None:
        """Plan by latencies, and correct them by the times of steps."""
        self._latencies, self._is_guessed = latencies, False
        self.scheduler.forward = self.scheduler.pace = latencies.forward

    @property
    def parts(self) -> JobParts:
        """The runner of jobs' and guests' work; created on first use."""
        if self._parts is None:
            scheduler, share, rule = self.scheduler, self._options.job_share, self._options.sharing
            jobs = Jobs(scheduler, self.device.cache, int(share * self.pool.size), self._note)
            sharing = CoServing() if rule is None else rule
            self._parts = JobParts(jobs, sharing, self.device, self.clock)
        return self._parts

    @property
    def jobs(self) -> Jobs:
        return self.parts.jobs

    @property
    def has_jobs(self) -> bool:
        return self._parts is not None and bool(self._parts.jobs)

    @property
    def sharing(self) -> Sharing:
        """The rule by which steps are shared with jobs."""
        return self.parts.sharing

    @sharing.setter
    def sharing(self, rule: Sharing) -> None:
        self.parts.sharing = rule

    @property
    def pool(self) -> PagePool:
        return self.scheduler.pool

    @property
    def is_idle(self) -> bool:
        """True if the engine has no requests, no jobs to run, and no chunks to return."""
        parts = self._parts
        trains = parts is not None and parts.sharing.trains and parts.jobs.unpaused
        is_left = self._running is not None or self.requests.chunks or self._acts or trains
        return self.scheduler.is_empty and not is_left

    @property
    def is_ahead(self) -> bool:
        """True while the device runs a step whose tokens are not read yet."""
        return self._running is not None

    def _called(self, verb: str, subject: str | Request) -> None:
        """Handle a call; an engine over ranks compares the calls of all ranks."""

    # ------------------------------------------------------------------------------- requests

    def submit(self, request: Request, submitted_s: float | None = None) -> str:
        """Submit a request; return its id. `step` returns its chunks.

        Args:
            submitted_s: time of arrival on the engine's clock; None for now.
        Raises:
            GenerationError: the model cannot run the request, its id is in use, or the machine
                cannot keep its SLOs.
            OutOfMemoryError: the request needs more memory than the engine's pool.
            QueueFullError: the queue is full.
        """
        self._called("submit", request)
        self.scheduler.limits.check(request)
        number, self.submitted = self.submitted, self.submitted + 1
        now = self.clock.now_s() if submitted_s is None else submitted_s
        sequence = self.device.open(request, number)
        opened = [sequence, *sequence.followers]
        for each in opened:
            each.times.submitted_s = now
            self.scheduler.limits.promise(each)
            if self.requests.of(each.id):
                raise GenerationError(
                    f"there is a request {each.id!r} already; use another request_id, or none"
                )
        self.log.add(Event(now, Kind.SUBMITTED, sequence.id, sequence.described()))
        error: GenerationError | None = self._suspects.why_broken(request)
        if error is None:
            error = self.scheduler.refusal(sequence, self.jobs.pages.most if self.has_jobs else 0)
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
        """End an open request by its id; `kind` may be TIMED_OUT."""
        self._called("cancel", request)
        with self._whole():
            self.requests.end(self.requests.of(request), State(kind.value), kind)

    def forget(self, adapter: ServedAdapter, *, is_gone: bool = True) -> None:
        """Drop cached values of a changed adapter; running requests keep their values."""
        self._suspects.forgive(adapter)
        with self._whole():
            self.scheduler.forget(adapter, is_gone=is_gone)
            if is_gone and not self.scheduler.adapters.has(adapter):
                self.device.evict(adapter)

    # ------------------------------------------------------------------------------- jobs

    def add_job(self, job: Job) -> Job:
        """Add a job. PcgError: another job has its name."""
        self._called("add_job", job.name)
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
        """End a prepared job that was not added."""
        self._called("drop_job", job.name)
        job.cancel()

    def interrupt_job(self, name: str) -> None:
        """End a job after its current step, with a checkpoint if it has a `checkpoint_dir`."""
        self._called("interrupt_job", name)
        with self._whole():
            self.jobs.interrupt(name)

    def pause_job(self, name: str) -> None:
        """Pause a job after its latest unit; the job keeps its pages."""
        self._called("pause_job", name)
        self.land()
        with self._whole():
            self.jobs.pause(name)

    def resume_job(self, name: str) -> None:
        """Resume a paused job."""
        self._called("resume_job", name)
        self.jobs.resume(name)

    def cancel_job(self, name: str) -> None:
        """End a job now; its adapter has the state of the last complete step."""
        self._called("cancel_job", name)
        self.land()
        with self._whole():
            self.jobs.cancel(name)

    # ------------------------------------------------------------------------------- a step

    def step(self) -> list[Chunk]:
        """Run a step; return the new chunks, and last chunks of requests ended since the last step.

        On a device that runs ahead, the chunks belong to the previous step.
        """
        with self._isolating():
            if self._acts:
                self.land()
            self._is_stepping = True
            self._step()
        return self.requests.take_chunks()

    @contextmanager
    def _isolating(self) -> Iterator[None]:
        """Handle an error of a step: end only the request or job that caused it."""
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
            self._is_stepping = False
            if self._parts is not None:
                self._parts.jobs.only = None

    def _step(self) -> None:
        """Plan a step, launch it and read it; on a device that runs ahead, read the step before."""
        before, is_ahead = self._running, self.is_ahead
        if before is not None and (why := self._why_read_first(before)):
            self._finish(why)
            before = None
        now_s = self.clock.latest_s()
        self.requests.time_out(now_s)
        suspect, plan = self._plan(now_s)
        begins_s = now_s if before is None else max(now_s, before.due_s)
        work = Work.of(plan, self.scheduler.limits, self._latencies, now_s)
        parts = self._parts
        shares = parts is not None and (bool(parts.jobs) or parts.guests is not None)
        if shares or work.is_promised:
            self.sharing.begin(work)
        windows = self._share(work, suspect, begins_s) if shares else []
        if not work.load.tokens:
            self._finish("nothing served")
            self._suspects.ran(suspect, has_tokens=False)
        else:
            why = "never ahead"
            if self.device.is_ahead:
                why = self._why_read_first(None, work.is_served)
            running = self._launch(plan, work, windows, suspect, begins_s, is_ahead=not why)
            if before is not None:
                self._finish(AHEAD)
                work.elapsed_s = max(work.elapsed_s, self.clock.latest_s() - self._read_s)
            running.launched.draw()
            if shares:
                self._run_beside(running, begins_s, is_behind=before is not None)
            if why:
                self._read(running, why)
            else:
                self._running, work.is_under_way = running, True
            self._ran = []
        if shares:
            if not work.is_served:
                self.parts.run(work)
            used = self.jobs.used()  # also resets the counts: idle time is charged to no tenant
            if work.is_served and used:
                self.scheduler.policy.trained(used)
        self.worked = bool(work.load.tokens or work.units or is_ahead)

    def _share(self, work: Work, suspect: Sequence | Job | None, begins_s: float) -> list[Window]:
        """Run parts of jobs before the forward; return the windows within it."""
        if not work.is_served:
            work.awaited = self.awaited
        self.jobs.pass_step()
        # Without latencies it is unknown how many parts fit beside a forward.
        work.is_beside = work.is_served and None not in (self.device.side, self._latencies)
        if work.is_served and not work.is_beside:
            self.parts.run(work)
        work.elapsed_s = max(0.0, self.clock.latest_s() - begins_s)
        return self.parts.windows(work, suspect)

    def _launch(
        self,
        plan: Plan,
        work: Work,
        windows: list[Window],
        suspect: Sequence | Job | None,
        begins_s: float,
        *,
        is_ahead: bool,
    ) -> Running:
        jobs, started_s = [job for job, _, _ in windows], self.clock.latest_s()
        self._ran = [sequence for sequence, _ in plan.chunks] + jobs
        if self.meanwhile is not None and self.device.side is None:
            self.meanwhile()
        launched = self.device.start(plan.chunks, [(unit, count) for _, unit, count in windows])
        number = 0
        if self._parts is not None:
            readings = self._parts.jobs.readings
            number = readings.begin() if is_ahead else readings.begun
        due_s = begins_s + work.ahead_s()
        running = Running(plan, work, launched, suspect, jobs, started_s, due_s, number)
        self.scheduler.launched(plan)
        if self.meanwhile is not None and self.device.side is not None:
            self.meanwhile()
        return running

    def _run_beside(self, running: Running, begins_s: float, *, is_behind: bool) -> None:
        """Run parts during the forward, and record windows that ran eagerly.

        Args:
            is_behind: True if the previous step was read after the launch of this step.
        """
        work, jobs = running.work, running.jobs
        takes_s = running.due_s - begins_s
        if work.is_beside:
            if self.meanwhile is not None and is_behind:
                self.meanwhile()
            with self.jobs.pages.shut() if is_behind else nullcontext():
                beside_s = self.parts.run_beside(work, jobs)
            running.expect((self._read_s if is_behind else begins_s) + takes_s + beside_s)
        if jobs or work.units:
            most = work.units + len(jobs) * self.device.layers
            self.parts.record(most, running.due_s if work.is_served else math.inf)

    def _why_read_first(self, running: Running | None, is_served: bool = True) -> str:
        """Return the reason to read a step before planning the next step; empty for none."""
        if self._suspects.current is not None:
            return "an error"
        if self._latencies is None and self.has_jobs:
            return "times unknown"
        if not is_served and self.has_jobs:
            return "nothing served"
        return "a prompt's end" if running is not None and running.is_read_first else ""

    def land(self) -> None:
        """Read the running step, if any; `step` returns its chunks. No effect within a step."""
        if self._is_stepping:
            return
        if self._running is not None:
            with self._isolating():
                self._finish("a call")
        while self._acts:
            self._acts[0]()
            self._acts.pop(0)  # after success: the next step repeats a failed function

    def when_landed(self, act: Callable[[], None]) -> None:
        """Run a function while no step is running: now or, within a step, before the next step."""
        self._acts.append(act)
        self.land()

    def _finish(self, why: str) -> None:
        """Read the running step, if any."""
        running = self._running
        if running is not None:
            self._read(running, why)
            self._running = None

    def _read(self, running: Running, why: str) -> None:
        """Wait for a step, learn from its times, and distribute its results."""
        self.reads[why] += 1
        results, work, plan = running.launched.read(), running.work, running.plan
        now_s, begins_s = self.clock.now_s(results.first_ns), max(work.began_s, self._read_s)
        took_s = running.took_s(now_s, self._read_s)
        self._read_s, work.is_under_way = now_s, False
        parts = self._parts
        if parts is not None:
            parts.jobs.readings.read = max(parts.jobs.readings.read, running.number)
        if plan.chunks and self._is_to_guess(work, plan, took_s):
            self._latencies = Latencies.guessed(work.load, took_s, self.device.layers)
            self.scheduler.pace = self._latencies.forward
            self._is_guessed = True
        work.ran_forward(took_s, running.launched.is_replayed)
        if work.units and self.parts.join(work):
            self._read_s = self.clock.now_s()  # the next forward waits for both streams
        work.lasted_s = self._read_s - begins_s
        if parts is not None:
            parts.settle()
        self.requests.accept(running, results, self.clock.latest_s())
        self._suspects.ran(running.suspect, has_tokens=bool(plan.chunks))

    def _is_to_guess(self, work: Work, plan: Plan, took_s: float) -> bool:
        """Return True if latencies are to be guessed from a step.

        True for the first step, and for a step that took far less time than predicted, as earlier
        steps may have compiled kernels.
        """
        if self._latencies is not None:
            return self._is_guessed and took_s < _FAR * self._latencies.forward.seconds(work.load)
        scheduler = self.scheduler
        is_bounded = scheduler.limits.prompt_stretch < math.inf
        is_paced = scheduler.policy.is_paced and not plan.has_prompts
        return is_bounded or is_paced or (self._parts is not None and self._parts.jobs.have_work)

    def _plan(self, now_s: float) -> tuple[Sequence | Job | None, Plan]:
        """Return the suspect that runs alone in the step, if any, and the plan of the step."""
        suspect, plan = self._suspects.current, Plan()
        self._alone = suspect
        if suspect is not None:
            self.jobs.only = () if isinstance(suspect, Sequence) else (suspect,)
        if isinstance(suspect, Sequence):
            plan = self.scheduler.plan_alone(suspect, now_s)
            if not plan.chunks:  # no room for the suspect now
                self._suspects.ran(suspect, has_tokens=False)
                suspect = self._alone = self.jobs.only = None
        parts = self._parts
        if suspect is None and (parts is None or parts.sharing.serves(parts.jobs.have_work)):
            plan = self.scheduler.plan(now_s)
        for sequence in plan.admitted:
            self._note(Kind.ADMITTED, sequence.id)
        return suspect, plan

    def _isolate(self, error: BaseException) -> None:
        """Drop the suspect that failed by itself; otherwise choose new suspects.

        A step that failed before any work ran is planned again, as the error may have no owner.
        Suspects are the owner of the failed work, and all requests and jobs of the step if the next
        step fails, too.

        The error is raised again if other ranks may not see the error, if steps fail repeatedly
        without an owner, or if the device is lost.
        """
        scheduler, running = self.scheduler, self._running
        ran = list(dict.fromkeys([*([] if running is None else running.ran), *self._ran]))
        admitted = list(scheduler.running)
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
            suspects += [waits for waits in scheduler.waiting if waits.request.adapter is owner][:1]
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
            suspects += ran or [*(admitted or scheduler.waiting)] or [*self.jobs]
        self._suspects.add(suspects)

    def _drop(self, suspect: Sequence | Job, owner: Owner | None, error: Exception) -> None:
        """Fail a suspect, or all requests of the adapter that failed."""
        try:
            self.device.check_alive()
        except Exception:
            raise error from None
        if not isinstance(suspect, Sequence):
            suspect.fail(error)
            self.jobs.settle(suspect)
            return
        of_adapter = [suspect]
        if owner is not None and owner is suspect.request.adapter:
            self._suspects.condemn(owner, error)
            of_adapter = [each for each in self.scheduler.everyone if each.request.adapter is owner]
        for each in of_adapter:
            self.requests.fail(each, error)

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Rebuild the state after a call that failed midway, and raise its error."""
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
        """Rebuild all recomputable state, which a failed call may have left inconsistent.

        Only the tokens of requests, and the units and pages of jobs, are kept.
        """
        self._is_half_changed, self._running = False, None
        # `now_s` would be a collective call, but some ranks did not fail.
        now_s = self.clock.latest_s()
        running = [
            sequence for sequence in self.requests.by_id.values() if sequence.state is State.RUNNING
        ]
        tables = []
        if self._parts is not None:
            self._parts.restart()
            tables = self._parts.jobs.tables
        self.device.reset()
        self.requests.restart(tables)
        for sequence in running:
            self.log.add(Event(now_s, Kind.PREEMPTED, sequence.id))

    def check_integrity(self) -> None:
        """Raise an AssertionError if a page, a sequence or a job is lost, or in two places."""
        self.scheduler.check_integrity()
        self.requests.check_integrity()
        if self._parts is not None:
            self._parts.jobs.check_integrity()


_FAR = 1 / 16
"""A step below this share of its predicted time replaces the guess; learning is too slow."""
