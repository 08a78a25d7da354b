"""GET /v1/fine_tuning/jobs/{id}/report: the page of a job's record, for its owner."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

from fastapi import APIRouter, Depends, Response
from fastapi.responses import HTMLResponse

from pcg.keys import Scope
from pcg.records.page import run_page
from pcg.records.report import MOST_BYTES
from pcg.records.run import read_run
from pcg.records.run_files import METRICS, has_run
from pcg.serve.files.files import Files
from pcg.serve.files.wire import missing
from pcg.serve.http.caller import Caller, requires
from pcg.serve.http.errors import ApiError
from pcg.serve.http.service import ServiceDependency
from pcg.serve.http.wire import page_headers
from pcg.serve.jobs import records
from pcg.serve.jobs.folders import JobFolder, folder_of
from pcg.serve.jobs.records import JobRecord

router = APIRouter(prefix="/v1/fine_tuning/jobs", tags=["fine-tuning"])


@router.get(
    "/{job_id}/report",
    response_class=Response,  # errors are JSON
    responses={200: {"content": {"text/html": {}}}},
)
async def job_report(
    job_id: str,
    service: ServiceDependency,
    caller: Annotated[Caller, Depends(requires(Scope.TRAIN))],
) -> HTMLResponse:
    """Return the page of a job: its curves, and its configuration as it was resolved."""
    job = await service.part(Files).read(lambda one: records.find(one, job_id, caller.tenant))
    if job is None:
        raise missing("FineTuningJob", job_id)
    page = await service.beside(caller, _page_of, job, folder_of(service.part(Files).store, job.id))
    return HTMLResponse(page, headers=page_headers(page))


def _page_of(job: JobRecord, folder: JobFolder) -> str:
    """Return a job's page, in which nothing is of the server's folders.

    Raises:
        ApiError: the job has not begun, or has too many steps for a page.
    """
    if not has_run(folder.record):
        raise ApiError(404, "The job has no report yet: it has not begun.", param="id")
    try:
        if (folder.record / METRICS).stat().st_size > MOST_BYTES:
            said = "The job has too many steps for a page; list its events."
            raise ApiError(400, said, param="id")
        run, resolved = read_run(folder.record), job.resolved
    except FileNotFoundError:  # the job was deleted meanwhile
        raise missing("FineTuningJob", job.id) from None
    error = None if job.error is None else str(json.loads(job.error)["message"])
    config = {
        "job": job.id,
        "status": job.status,
        "base": job.model,
        "seed": job.seed,
        **{name: resolved[name] for name in ("total_steps", "examples", "options", "peft")},
    }
    facts = dataclasses.replace(run.facts, name=job.name, kind="serve", error=error)
    return run_page(dataclasses.replace(run, facts=facts, config=config))
