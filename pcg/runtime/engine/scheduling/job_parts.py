"""Jobs in a step: windows within the forward, and parts before, after or during the forward.

Parts during the forward run on a second stream. Guests' work runs before parts of jobs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from collections.abc import Sequence as List
from contextlib import contextmanager, nullcontext
from typing import TypeAlias

from pcg.runtime.engine.device.clock import Clock
from pcg.runtime.engine.device.device import Device
from pcg.runtime.engine.scheduling.guest_work import GuestWork
from pcg.runtime.engine.scheduling.jobs import Job, Jobs, PartGroup
from pcg.runtime.engine.scheduling.work import Sharing, Work
from pcg.runtime.training.work_units import Forward, Part, WindowedPass

Window: TypeAlias = tuple[Job, Forward, int]
"""A job with a window in a step's forward, the job's unit, and the window's tokens."""


class JobParts:
    """Runs as many parts of jobs in a step as a rule of sharing allows.

    Attributes:
        jobs: the jobs of the engine.
        sharing: the rule.
        guests: guests' work; None without guests.
    """

    def __init__(self, jobs: Jobs, sharing: Sharing, device: Device, clock: Clock) -> None:
        self.jobs = jobs
        self.sharing = sharing
        self._device = device
        self._clock = clock
        self._beside: list[tuple[PartGroup, float]] = []
        self._passes: list[WindowedPass] = []  # that ran in this step
        self.guests: GuestWork | None = None

    def windows(self, work: Work, suspect: object) -> list[Window]:
        """Return the windows that go forward whole in a step.

        Args:
            suspect: the only request or job that may run; None without a suspect.
        """
        windows: list[Window] = []
        for job, unit in self.jobs.forward():
            if suspect not in (None, job):
                continue
            tokens = unit.whole.fitting(min(unit.remaining, self.sharing.forward(work, unit)))
            if tokens > 0:
                windows.append((job, unit, tokens))
                self._passes.append(unit.whole)
                before, seconds = work.load, 0.0
                work.load += unit.load(tokens)
                if work.latencies is not None:
                    forward = work.latencies.forward
                    seconds = forward.seconds(work.load) - forward.seconds(before)
                job.ran(tokens, seconds, work.began_s)
        return windows

    def run(self, work: Work) -> None:
        """Run parts before the forward of a step, or in a step that serves nothing."""
        started_s = work.began_s
        ahead_s = work.ahead_s() if work.is_served else 0.0
        work.elapsed_s = self._clock.latest_s() - started_s
        if self.guests is not None and self.jobs.only is None:
            self.guests.run(work, ahead_s)
        while not work.is_over and (group := self.jobs.next_group(self.sharing, work, ahead_s)):
            try:
                self._run(group.parts)
            except Exception as error:
                self._fail(group, error)
                return
            before_s = work.elapsed_s
            with self._advancing(group):
                self._advance(work, group)
                work.elapsed_s = self._clock.now_s() - started_s
                with_update_s = work.elapsed_s - before_s
                group.ran(with_update_s, work.began_s)
                work.ran_parts(group.phase, group.load, with_update_s)
                self.sharing.ran(work, with_update_s)
            if not work.is_served:
                self.record(len(group.parts))

    def _run(self, parts: List[Part]) -> None:
        side = self._device.side
        if side is None:
            self._device.run_parts(parts)
            return
        side.begin()
        with side.beside(), side.timed():
            self._device.run_parts(parts)
        side.join()

    def run_beside(self, work: Work, busy: Collection[Job]) -> float:
        """Run parts on the second stream during the forward; return their predicted time.

        Busy jobs, with windows in the forward, run no parts: they would read unfinished values.
        Observed and predicted times are those of both streams running together.
        """
        side, latencies = self._device.side, work.latencies
        assert side is not None
        assert latencies is not None
        spent_s, beside_s = work.ahead_s(), 0.0
        with side.beside():
            if self.guests is not None:
                self.guests.run(work, spent_s)
            while group := self.jobs.next_group(self.sharing, work, spent_s, busy):
                try:
                    with side.timed():
                        self._device.run_parts(group.parts)
                except Exception as error:
                    self._fail(group, error)
                    break
                with self._advancing(group):
                    foretold_s = latencies.of(group.phase).seconds(group.load)
                    spent_s += foretold_s
                    self._beside.append((group, foretold_s))
                    self.sharing.ran(work, foretold_s)
                    beside_s += foretold_s
                    self._advance(work, group)
                    group.ran(foretold_s, work.began_s)
        side.rejoin()
        return beside_s

    def record(self, most: int, due_s: float = math.inf) -> None:
        """Record up to `most` layers of windows that ran eagerly, while the device is busy.

        Recording runs a layer once more; that run counts for no job.

        Args:
            due_s: time at which the device becomes idle. The first layer is always recorded;
                recording stops when less than twice the time of a layer is left until then.
        """
        passes, self._passes = dict.fromkeys(self._passes), []
        for whole in passes:
            while most > 0 and whole.has_unrecorded:
                began_s = self._clock.latest_s()
                whole.record_next()
                now_s, most = self._clock.latest_s(), most - 1
                if now_s + 2 * (now_s - began_s) > due_s:
                    return

    def settle(self) -> None:
        """Advance jobs by the results read; on a GPU, on the second stream."""
        jobs = self.jobs.unpaused
        if not jobs:
            return
        side = self._device.side
        with nullcontext() if side is None else side.beside():
            for job in jobs:
                self.jobs.settle(job)
        if side is not None:
            side.rejoin()

    def join(self, work: Work) -> bool:
        """Wait for parts on the second stream and learn their times; return True if any ran."""
        groups, self._beside = self._beside, []
        if not groups:
            return False
        side = self._device.side
        assert side is not None
        for (group, foretold_s), took_s in zip(groups, side.join(), strict=True):
            work.ran_parts(group.phase, group.load, took_s)
            self.sharing.ran(work, took_s - foretold_s)
        return True

    def restart(self) -> None:
        """Restore unfinished jobs after a failed step or call."""
        self._beside, self._passes = [], []
        self.jobs.restart()

    def _fail(self, group: PartGroup, error: Exception) -> None:
        if not self._device.fails_alike:
            raise error
        self.jobs.failed(group, error)

    @contextmanager
    def _advancing(self, group: PartGroup) -> Iterator[None]:
        """Restart the steps of a group's jobs if an error occurs after their parts ran."""
        try:
            yield
        except Exception:
            self.jobs.begin_again(group)
            raise

    def _advance(self, work: Work, group: PartGroup) -> None:
        work.units += len(group.parts)
        self._passes += [part.whole for part in group.parts]
        for job in group.jobs:
            job.advance()
            self.jobs.settle(job)
