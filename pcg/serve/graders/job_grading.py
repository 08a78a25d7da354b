"""Grades of a job's completions, with its tenant's rights."""

from __future__ import annotations

from typing import Any

from pcg.graders.reader import grader_from
from pcg.graders.rewards import rewards_of
from pcg.graders.sample import Sample
from pcg.keys import Scope
from pcg.serve.engine.news import JobSamples
from pcg.serve.graders.host import ServedHost
from pcg.serve.http.caller import Caller
from pcg.serve.http.service import Service


class JobGrading:
    """Grades what a job's model wrote.

    The key that made the job had the scopes that its grader needs, or there would be no job.
    """

    def __init__(self, service: Service) -> None:
        self._service = service

    async def grade(self, tenant: str, job: str, grader: Any, samples: JobSamples) -> list[float]:
        """Return a reward for each completion; one that cannot be graded has 0.

        Raises:
            GraderError: none of them can be graded; why the first cannot.
        """
        caller = Caller(job, tenant, frozenset({Scope.INFER, Scope.TRAIN}))
        made = await self._service.beside(caller, grader_from, grader)
        host = ServedHost(self._service, caller, waits=True)
        pairs = zip(samples.texts, samples.items, strict=True)
        return await rewards_of(made, [Sample(text, item) for text, item in pairs], host)
