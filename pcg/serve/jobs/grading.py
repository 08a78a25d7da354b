"""The grading of jobs' completions, as the runner asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from pcg.errors import PcgError
from pcg.serve.engine.news import JobSamples
from pcg.serve.http.errors import LOG
from pcg.serve.jobs.records import JobRecord


class Grading(Protocol):
    """Grades what jobs' models wrote, with their tenants' rights."""

    async def grade(self, tenant: str, job: str, grader: Any, samples: JobSamples) -> list[float]:
        """Return a reward for each completion. GraderError: none can be graded."""
        ...


async def graded(
    grading: Grading, job: JobRecord, samples: JobSamples
) -> tuple[Sequence[float], str | None]:
    """Return the rewards of a job's completions, or why there are none."""
    try:
        return await grading.grade(job.tenant, job.id, job.resolved["grader"], samples), None
    except PcgError as error:
        return (), str(error).encode(errors="replace").decode()  # as no message has half characters
    except Exception as error:
        LOG.error("the grader of job %s failed", job.id, exc_info=error)
        return (), "the grader failed"
