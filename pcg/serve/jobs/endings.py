"""The endings of jobs: errors of those that fail, and of changes that come too late."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from pcg.serve.engine.jobs.news import JobEnd
from pcg.serve.errors import ApiError
from pcg.serve.jobs.folders import JobFolder

_CODES = {
    "DataError": ("invalid_training_file", "training_file"),
    "OutOfMemoryError": ("out_of_memory", None),
    "RecordError": ("storage_full", None),
    "StoreFullError": ("storage_full", None),
    "UnsupportedError": ("unsupported", None),
}


@dataclass(frozen=True)
class Failure:
    """The error of a job, as clients see it."""

    code: str
    message: str
    param: str | None

    @property
    def json(self) -> str:
        return json.dumps({"code": self.code, "message": self.message, "param": self.param})


def failure_of(end: JobEnd, folder: JobFolder) -> Failure:
    """Return the error of a job that failed, without names of the server's folders."""
    code, param = _CODES.get(end.kind or "", ("job_failed", None))
    text = folder.without_paths(end.text or "The job failed.")
    if param is not None and text.startswith(folder.validation.name):
        code, param = "invalid_validation_file", "validation_file"
    return Failure(code, text, param)


def in_status(id: str, status: str, wanted: Sequence[str]) -> ApiError:
    """Return the error of a change that a job's status does not allow."""
    return ApiError(
        400,
        f"Job {id} is {status}; this can be done to one that is {' or '.join(wanted)}.",
        code="invalid_job_status",
    )


def check_count(count: int, most: int) -> None:
    """Raise an ApiError if a tenant may not have one more job that is not over."""
    if count >= most:
        raise ApiError(
            429,
            f"You have {count} jobs that are not over, and may have {most}: wait, or cancel some.",
            code="too_many_jobs",
            headers={"x-should-retry": "false"},
        )
