"""The finetuning jobs of an engine: their turns, pages and pending readings of numbers.

On a device that runs ahead, the host prepares step n+1 while step n runs. If a job read its loss at
that point, the host would wait for the device, and then the device for the host. So the job pauses
until step n and its numbers have been read (`LateReadings`):

    host      launch n+1 · read n · jobs continue by the numbers of n · parts n+1 · launch n+2 · …

Updates and new versions are the same as without the delay.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pcg.errors import (
    FinetuneError,
    FinetuneInterrupted,
    OutOfMemoryError,
    PcgError,
    as_pcg_error,
)
from pcg.runtime.engine.scheduling.scheduler import Scheduler
from pcg.runtime.engine.scheduling.work import Refusal, Sharing, Work
from pcg.runtime.memory.pool import PageTable, pages_for
from pcg.runtime.metrics.events import Kind
from pcg.runtime.metrics.status import JobState
from pcg.runtime.requests.step import Load
from pcg.runtime.training.options import StepRecord
from pcg.runtime.training.work_units import (
    Forward,
    Pages,
    Part,
    Phase,
    Reading,
    Release,
    StepBeginsAgain,
    Unit,
)
from pcg.runtime.training.work_units import Work as Units


class JobPages:
    """Gives pages of the pool to jobs.

    Attributes:
        most: limit of pages for all jobs together.
    """

    def __init__(self, scheduler: Scheduler, most: int) -> None:
        self.most = most
        self._is_shut = False
        self._scheduler = scheduler
        self._held = 0

    @contextmanager
    def shut(self) -> Iterator[None]:
        """Give out no pages within the `with`: a running forward may still write freed pages."""
        self._is_shut = True
        try:
            yield
        finally:
            self._is_shut = False

    def open(self, name: str, unit: Pages) -> tuple[PageTable, ...] | None:
        """Return the pages of a job; None while there is no room.

        OutOfMemoryError: the job needs more pages than jobs may hold.
        """
        needs = [pages_for(count) for count in unit.tokens]
        total = sum(needs)
        if total > self.most:
            raise OutOfMemoryError(
                f"a batch of job {name!r} needs {total} pages of the KV cache, and finetuning may "
                f"hold {self.most}; lower batch_size, or give the engine more memory"
            )
        scheduler, pool = self._scheduler, self._scheduler.pool
        # A request accepted before the first job may need more pages than jobs leave.
        most = min(self.most, pool.size - scheduler.most_pages)
        if self._is_shut or self._held + total > most or not scheduler.adapters.make_room(total):
            return None
        tables = []
        for need in needs:
            table = pool.open(f"job {name!r}", need)
            pool.extend(table, need)
            tables.append(table)
        self._held += total
        return tuple(tables)

    def close(self, tables: Iterable[PageTable]) -> None:
        """Take a job's pages back."""
        for table in tables:
            self._held -= len(table.pages)
            self._scheduler.pool.close(table)

    def restart(self, tables: Iterable[PageTable]) -> None:
        """Recount the pages of jobs after a failed call."""
        self._is_shut = False
        self._held = sum(len(table.pages) for table in tables)

    def check_integrity(self, tables: Iterable[PageTable]) -> None:
        """Raise an AssertionError unless `tables` have all pages of jobs."""
        assert self._held == sum(len(table.pages) for table in tables)


class LateReadings:
    """Readings that wait for the running step.

    Attributes:
        begun: number of late-read steps launched so far.
        read: number of those that were read.
    """

    def __init__(self) -> None:
        self.begun = self.read = 0

    def begin(self) -> int:
        """Count the launch of a late-read step, and return its number."""
        self.begun += 1
        return self.begun

    def give_up(self) -> None:
        """End all waits after a failed step; the next reading may raise the step's error."""
        self.read = self.begun

    def hold(self, reading: Reading) -> bool:
        """Return True if a reading has to wait."""
        if reading.step is None:
            reading.step = self.begun
        return reading.step > self.read


_LOG = logging.getLogger("pcg.engine")


_ENDS = {
    JobState.SUCCEEDED: Kind.COMPLETED,
    JobState.CANCELLED: Kind.CANCELLED,
    JobState.FAILED: Kind.FAILED,
}


def _nothing() -> None:
    """Do nothing."""


class Job:
    """A finetuning job.

    Attributes:
        name: name of the job and its adapter.
        unit: the next unit; None before the start and after the end.
        tokens: tokens of windows and parts so far; the job with the fewest runs next.
        runs_alone: True after a failure of parts that ran together with other jobs' parts.
        held: number of consecutive steps without work of the job.
        refusal: the reason in the latest of these steps; None if time was not the reason.
        began_s, latest_s: times of the first and the latest unit, on the engine's clock; `began_s`
            is None before the first.
        spent_s: predicted or measured time of the units, seconds.
        tenant: the tenant to charge for work in served steps; empty for none.
        used: work since the last `Jobs.used`, in tokens of a forward pass of equal time.
        record: record of the last step; None before the first step.
        steps: number of steps on this engine, excluding steps before a resume.
    """

    def __init__(
        self,
        name: str,
        work: Units[Any],
        on_end: Callable[[], None] = _nothing,
        on_interrupt: Callable[[], None] | None = None,
        tenant: str = "",
    ) -> None:
        """Create a job from its units.

        Args:
            on_end: called when the job is over, in any case.
            on_interrupt: makes the units end after a step, with a checkpoint.
        """
        self.name = name
        self.state = JobState.QUEUED
        self.unit: Unit | None = None
        self.tokens = 0
        self.runs_alone = False
        self.held = 0
        self.refusal: Refusal | None = None
        self.began_s: float | None = None
        self.latest_s = 0.0
        self.spent_s = 0.0
        self.tenant = tenant
        self.used = 0.0
        self.tables: tuple[PageTable, ...] = ()
        self.error: PcgError | None = None
        self.result: Any = None
        self._work = work
        self._on_end = on_end
        self._on_interrupt = on_interrupt
        self.record: StepRecord | None = None
        self.steps = 0

    @property
    def is_over(self) -> bool:
        return self.state in _ENDS

    def advance(self) -> None:
        """Advance to the next unit, or to the end."""
        self._resume(lambda: next(self._work))

    def _resume(self, resume: Callable[[], Unit]) -> None:
        try:
            self.unit = resume()
        except StopIteration as end:
            if self.result is None:  # else `conclude` failed earlier
                self.unit, self.result = None, end.value
            self._end(JobState.SUCCEEDED)
        except Exception as error:  # including errors of callbacks
            self.fail(error)

    def ran(self, tokens: int, seconds: float, now_s: float, share: float = 1.0) -> None:
        """Count work; `share` is its time relative to a forward pass of the tokens."""
        self.used += share * tokens
        self.tokens, self.spent_s = self.tokens + tokens, self.spent_s + seconds
        self.held, self.refusal = 0, None
        self.began_s = now_s if self.began_s is None else self.began_s
        self.latest_s = now_s + seconds

    def begin_step_again(self) -> None:
        """Restart the current step."""
        if self.result is None:
            self._resume(lambda: self._work.throw(StepBeginsAgain()))

    def cancel(self) -> None:
        self._end(JobState.CANCELLED)

    def interrupt(self) -> None:
        """End after the current step, with a checkpoint if the job has a `checkpoint_dir`."""
        if self.state is JobState.QUEUED or self._on_interrupt is None:
            self.cancel()
        else:
            self._on_interrupt()

    def fail(self, error: Exception) -> None:
        if self.is_over:  # `conclude` failed
            self.conclude()
            return
        self.error = as_pcg_error(error, f"job {self.name!r}", FinetuneError)
        is_interrupted = isinstance(error, FinetuneInterrupted)
        self._end(JobState.CANCELLED if is_interrupted else JobState.FAILED)

    def _end(self, state: JobState) -> None:
        self.unit, self.state = None, state
        self.conclude()

    def conclude(self) -> None:
        """Close the units and free the name; may be repeated after an error."""
        self._work.close()
        self._on_end()
        self._on_end = _nothing


@dataclass
class PartGroup:
    """Parts of the same stage that run together, with each part's job and tokens."""

    jobs: list[Job] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    load: Load = field(default_factory=Load)
    phase: Phase = Phase.BACKWARD

    def ran(self, seconds: float, now_s: float) -> None:
        """Count the work of each job; the time is divided in proportion to tokens."""
        passes = {Phase.FORWARD: 1.0, Phase.LOSS: 0.0, Phase.BACKWARD: 2.0}[self.phase]
        for job, part, tokens in zip(self.jobs, self.parts, self.tokens, strict=True):
            own_s = seconds * tokens / max(self.load.tokens, 1)
            job.ran(tokens, own_s, now_s, passes / max(part.layers, 1))

    def add(self, job: Job, part: Part) -> None:
        load = part.load
        self.phase = part.stage.phase
        self.jobs.append(job)
        self.parts.append(part)
        self.tokens.append(load.tokens)
        self.load += load


class Jobs:
    """Active jobs.

    Attributes:
        pages: the pages of jobs.
        readings: the pending readings.
        only: the jobs that may run in this step; None for all.
    """

    def __init__(
        self, scheduler: Scheduler, cache: Any, most_pages: int, note: Callable[..., None]
    ) -> None:
        self.pages = JobPages(scheduler, most_pages)
        self._cache = cache
        self._note = note
        self._jobs: list[Job] = []
        self.only: Collection[Job] | None = None
        self._limits = scheduler.limits
        missed = 1 - self._limits.tpot_percentile / 100
        self._patience = math.ceil(2 / missed)
        self.readings = LateReadings()

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs)

    def __len__(self) -> int:
        return len(self._jobs)

    def __getitem__(self, place: int) -> Job:
        return self._jobs[place]

    def add(self, job: Job) -> Job:
        """Add a job. PcgError: another job has the name."""
        self.check_free(job.name)
        self._note(Kind.QUEUED, job.name)
        self._jobs.append(job)
        return job

    def check_free(self, name: str) -> None:
        """Raise a PcgError if a job has the name."""
        if any(job.name == name for job in self._jobs):
            raise PcgError(f"there is a job {name!r} already; cancel it, or wait for its end")

    def pause(self, name: str) -> None:
        job = self._named(name)
        if job.state is JobState.QUEUED:
            self.settle(job)
        if job.state is JobState.RUNNING:
            job.state = JobState.PAUSED
            self._note(Kind.PAUSED, name)

    def resume(self, name: str) -> None:
        job = self._named(name)
        if job.state is JobState.PAUSED:
            job.state = JobState.RUNNING
            self._note(Kind.RESUMED, name)

    def cancel(self, name: str) -> None:
        job = self._named(name)
        job.cancel()
        self._end(job)

    def interrupt(self, name: str) -> None:
        """End a job after its current step, with a checkpoint if it has a `checkpoint_dir`."""
        job = self._named(name)
        job.interrupt()
        if job.is_over:
            self._end(job)
        else:
            self.resume(name)

    def _named(self, name: str) -> Job:
        for job in self._jobs:
            if job.name == name:
                return job
        names = ", ".join(job.name for job in self._jobs) or "none"
        raise PcgError(f"there is no job {name!r}; there are: {names}")

    # ------------------------------------------------------------------------------- turns

    def pass_step(self) -> None:
        """Count a waiting step for each job with work; running a unit resets the count."""
        for job in self.unpaused:
            job.held += isinstance(job.unit, Forward | Part)
            if job.held == self._patience // 2 and job.refusal is not None:
                reason = job.refusal.described(self._limits)
                _LOG.info("job %r waited for %d steps: %s", job.name, job.held, reason)

    def used(self) -> dict[str, int]:
        """Return the tokens of forward passes that jobs used since the last call, by tenant."""
        used: dict[str, int] = {}
        for job in self._jobs:
            if whole := int(job.used):
                used[job.tenant] = used.get(job.tenant, 0) + whole
                job.used -= whole
        return used

    def _is_due(self, job: Job) -> bool:
        return job.held >= self._patience

    @property
    def unpaused(self) -> list[Job]:
        going = self._jobs if self.only is None else self.only
        return [job for job in going if job.state is not JobState.PAUSED]

    @property
    def have_work(self) -> bool:
        """True if a job has a unit to run, or has not started."""
        return any(
            isinstance(job.unit, Forward | Part) or job.state is JobState.QUEUED
            for job in self.unpaused
        )

    def forward(self) -> Iterator[tuple[Job, Forward]]:
        """Yield jobs with tokens to run forward, jobs with the fewest tokens so far first."""
        for job in sorted(self.unpaused, key=lambda job: job.tokens):
            self.settle(job)
            if isinstance(job.unit, Forward):
                yield job, job.unit

    def parts(self, busy: Collection[Job] = ()) -> list[tuple[Job, Part]]:
        """Return parts of a single stage that can run together, jobs with the fewest tokens first.

        The stage furthest from the end is chosen, so that other jobs catch up and a single read of
        the base's weights serves all. A job waits for at most a pass of each other job. Losses run
        separately.
        """
        idle = [job for job in self.unpaused if job not in busy]
        ready = [(job, job.unit) for job in idle if isinstance(job.unit, Part)]
        alone = [pair for pair in ready if pair[0].runs_alone or self._is_due(pair[0])]
        if alone:
            return [min(alone, key=lambda pair: pair[0].tokens)]
        last = max((part.stage for _, part in ready), default=None)
        merged = [(job, part) for job, part in ready if part.stage == last]
        ordered = sorted(merged, key=lambda pair: pair[0].tokens)
        return ordered[:1] if last is not None and last.phase is Phase.LOSS else ordered

    def settle(self, job: Job) -> None:
        """Bring a job to its next forward or backward unit, or to its end."""
        if job.state is JobState.QUEUED:
            self._note(Kind.STARTED, job.name)
            job.state = JobState.RUNNING
            job.advance()
        while not job.is_over:
            unit = job.unit
            if isinstance(unit, Pages):
                if not self._open(job, unit):
                    return
            elif isinstance(unit, Release):
                self._close(job)
            elif isinstance(unit, Reading):
                if self.readings.hold(unit):
                    return
            elif isinstance(unit, Part) or (isinstance(unit, Forward) and not unit.is_over):
                return
            if not job.is_over:
                job.advance()
        self._end(job)

    def next_group(
        self, sharing: Sharing, work: Work, ahead_s: float, busy: Collection[Job] = ()
    ) -> PartGroup | None:
        """Return the next parts to run in a step, by a rule of sharing; None for none.

        Args:
            ahead_s: time of other work in the step, seconds.
            busy: jobs with windows in the forward, which run no parts during the forward.
        """
        for job, unit in self.forward():
            if job in busy:
                continue
            is_due = self._is_due(job)
            tokens = unit.whole.fitting(sharing.in_layers(work, unit, ahead_s, is_due=is_due))
            job.refusal = work.refusal
            if tokens:
                unit.whole.begin_window(tokens)
                self.settle(job)
        group = PartGroup()
        for job, part in self.parts(busy):
            is_due = self._is_due(job) and not group.jobs
            tokens = sharing.part(work, part, group.load, ahead_s, is_due=is_due)
            if not tokens:
                job.refusal = work.refusal
                break
            group.add(job, part.of(tokens))
        return group if group.jobs else None

    def failed(self, group: PartGroup, error: Exception) -> None:
        """Fail the only job of a failed group, or run several jobs separately from now on."""
        if len(group.jobs) == 1:
            group.jobs[0].fail(error)
        else:
            self.begin_again(group)
        for job in group.jobs:
            job.runs_alone = True
            self.settle(job)

    def begin_again(self, group: PartGroup) -> None:
        """Restart the step of each job of a group, as parts may be incomplete."""
        for job in group.jobs:
            if isinstance(job.unit, Forward | Part | Pages):
                job.begin_step_again()

    # ------------------------------------------------------------------------------- pages

    def _open(self, job: Job, unit: Pages) -> bool:
        """Give a job pages; return False while there is no room."""
        if job.tables:
            return True
        try:
            tables = self.pages.open(job.name, unit)
        except OutOfMemoryError as error:
            job.fail(error)
            return True
        if tables is None:
            return False
        job.tables = unit.tables = tables
        unit.cache = self._cache
        return True

    def _close(self, job: Job) -> None:
        tables, job.tables = job.tables, ()
        self.pages.close(tables)

    def _end(self, job: Job) -> None:
        if job in self._jobs:
            self._jobs.remove(job)
            self._note_end(job)
            self._close(job)

    def _note_end(self, job: Job) -> None:
        reason = {} if job.error is None else {"reason": str(job.error)}
        self._note(_ENDS[job.state], job.name, job=True, **reason)

    @property
    def tables(self) -> list[PageTable]:
        """The pages of all jobs."""
        return [table for job in self._jobs for table in job.tables]

    def restart(self) -> None:
        """Restore unfinished jobs after a failed call."""
        self.readings.give_up()
        for job in [job for job in self._jobs if job.is_over]:
            self._jobs.remove(job)
            job.conclude()
            self._note_end(job)
        self.pages.restart(self.tables)

    def check_integrity(self) -> None:
        """Raise an AssertionError if a page of a job is lost."""
        self.pages.check_integrity(self.tables)
