"""/v1/fine_tuning: OpenAI's jobs, which the engine that serves runs."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel

from pcg.errors import AdapterError, StoreDamagedError
from pcg.keys import Scope
from pcg.serve.adapters.catalog import Catalog
from pcg.serve.engine.engine_names import engine_name
from pcg.serve.files.files import Files
from pcg.serve.files.records import FileRecord, Page
from pcg.serve.files.wire import ListPage, missing
from pcg.serve.graders.host import usable_grader
from pcg.serve.http.caller import Caller, requires
from pcg.serve.http.errors import UNSUPPORTED, ApiError
from pcg.serve.http.service import LongBodyRoute, Service, ServiceDependency
from pcg.serve.jobs import event_records, records
from pcg.serve.jobs.folders import folder_of
from pcg.serve.jobs.progress import checkpoint_name
from pcg.serve.jobs.records import QUEUED, JobRecord
from pcg.serve.jobs.reinforcement import Reinforcement, count_prompts, resolve_reinforcement
from pcg.serve.jobs.runner import JobRunner
from pcg.serve.jobs.settings import MOST_STEPS, PcgSettings, count_examples, resolve
from pcg.serve.jobs.wire import (
    Checkpoint,
    DeletedJob,
    Event,
    Job,
    JobBody,
    checkpoint_of,
    event_of,
    job_of,
)
from pcg.serve.store.tables import new_key, now

router = APIRouter(prefix="/v1/fine_tuning/jobs", tags=["fine-tuning"], route_class=LongBodyRoute)

Trainer = Annotated[Caller, Depends(requires(Scope.TRAIN))]
After = Annotated[str | None, Query(max_length=128)]
Limit = Annotated[int, Query(ge=1, le=100)]

_MOST_JOBS = 64
"""The most jobs of a tenant that are not over."""
_MOST_PAIRS = 16
_METADATA = re.compile(r"metadata\[(.{1,64})\]", re.DOTALL)

Record = TypeVar("Record")
Shown = TypeVar("Shown", bound=BaseModel)


@router.post("")
async def create_job(body: JobBody, service: ServiceDependency, caller: Trainer) -> Job:
    """Make a job of a file; what is `auto` is resolved, and the file looked at line by line."""
    files, (method, given) = service.part(Files), body.given()
    if (why := service.client.facts.no_jobs) is not None:
        raise ApiError(400, f"This server runs no jobs. {why}.", code="unsupported")
    start = await _start(service, caller, body.model)
    if isinstance(given, Reinforcement):
        await usable_grader(service, caller, given.grader, "method.reinforcement.grader")
    training = await _file(service, caller, body.training_file, "training_file")
    validation = None
    if body.validation_file is not None:
        validation = await _file(service, caller, body.validation_file, "validation_file")
    id, own = new_key("ftjob-"), body.pcg or PcgSettings()
    folder = folder_of(files.store, id)
    try:
        try:
            await service.beside(
                caller,
                folder.make,
                files.store.contents,
                training.digest,
                None if validation is None else validation.digest,
                start,
            )
        except StoreDamagedError:
            for one in filter(None, (training, validation)):
                await files.find(caller.tenant, one.id)  # or it was deleted meanwhile
            raise
        count: Callable[[Path, str], int] = partial(count_examples, method=method)
        if isinstance(given, Reinforcement):
            count = count_prompts
        examples = await service.beside(caller, count, folder.training, "training_file")
        tests = 0
        if validation is not None:
            tests = await service.beside(caller, count, folder.validation, "validation_file")
        named = None if start is None else body.model
        if isinstance(given, Reinforcement):
            most = service.max_model_len
            config = resolve_reinforcement(given, own, examples, tests, most, named)
            _check_width(service, config["options"]["grpo"]["num_generations"])
        else:
            config = resolve(given, own, examples, method, named)
        written = json.dumps(config)
        record = JobRecord(
            id,
            caller.tenant,
            body.model,
            _name(service, caller, body.suffix),
            QUEUED,
            now(),
            None,
            training.id,
            None if validation is None else validation.id,
            secrets.randbelow(2**31) if body.seed is None else body.seed,
            json.dumps(body.metadata) if body.metadata else None,
            written,
            base=service.client.facts.base_digest,
            config_bytes=len(written),
        )
        held = [(one.digest, one.size_bytes) for one in (training, validation) if one is not None]
        made = await service.part(JobRunner).create(record, _MOST_JOBS, held)
    except Exception:  # where the task was cancelled, the job may be there
        folder.remove()
        raise
    return job_of(made)


@router.get("")
async def list_jobs(
    request: Request,
    service: ServiceDependency,
    caller: Trainer,
    after: After = None,
    limit: Limit = 20,
    metadata: Annotated[str | None, Query(max_length=8)] = None,
) -> ListPage[Job]:
    """List the tenant's jobs, the newest first; `metadata[k]=v`, or `metadata=null`, picks some."""
    if metadata not in (None, "null"):
        raise ApiError(400, "Use metadata[KEY]=VALUE, or metadata=null.", param="metadata")
    pairs = {}
    for name, value in request.query_params.multi_items():
        if not name.startswith("metadata["):
            continue
        key = _METADATA.fullmatch(name)
        if key is None:
            said = "Use metadata[KEY]=VALUE with a key of 1 to 64 characters."
            raise ApiError(400, said, param="metadata")
        pairs[key[1]] = value
    if len(pairs) > _MOST_PAIRS:
        raise ApiError(400, f"Use at most {_MOST_PAIRS} pairs.", param="metadata")
    page = Page(after, limit, is_rising=False)
    found = await service.part(Files).read(
        lambda one: records.listed(
            one, caller.tenant, page, pairs, without_metadata=metadata is not None
        )
    )
    return _page(found, limit, job_of)


@router.get("/{job_id}")
async def get_job(job_id: str, service: ServiceDependency, caller: Trainer) -> Job:
    """Return a job."""
    return job_of(await _job(service, caller, job_id))


@router.delete("/{job_id}")
async def delete_job(job_id: str, service: ServiceDependency, caller: Trainer) -> DeletedJob:
    """Remove a job that is over, with its events and checkpoints' rows; its models stay."""
    await service.part(JobRunner).remove(await _job(service, caller, job_id))
    return DeletedJob(id=job_id)


@router.post("/{job_id}/cancel")
async def cancel_job(job_id: str, service: ServiceDependency, caller: Trainer) -> Job:
    """Cancel a job; its checkpoints stay."""
    return job_of(await service.part(JobRunner).cancel(await _job(service, caller, job_id)))


@router.post("/{job_id}/pause")
async def pause_job(job_id: str, service: ServiceDependency, caller: Trainer) -> Job:
    """Pause a job behind its step, with a checkpoint."""
    return job_of(await service.part(JobRunner).pause(await _job(service, caller, job_id)))


@router.post("/{job_id}/resume")
async def resume_job(job_id: str, service: ServiceDependency, caller: Trainer) -> Job:
    """Go on with a paused job."""
    return job_of(await service.part(JobRunner).resume(await _job(service, caller, job_id)))


@router.get("/{job_id}/events")
async def list_events(
    job_id: str,
    service: ServiceDependency,
    caller: Trainer,
    after: After = None,
    limit: Limit = 20,
) -> ListPage[Event]:
    """List the events of a job, the newest first."""
    await _job(service, caller, job_id)
    page = Page(after, limit, is_rising=False)
    found = await service.part(Files).read(lambda one: event_records.listed(one, job_id, page))
    return _page(found, limit, event_of)


@router.get("/{job_id}/checkpoints")
async def list_checkpoints(
    job_id: str,
    service: ServiceDependency,
    caller: Trainer,
    after: After = None,
    limit: Limit = 10,
) -> ListPage[Checkpoint]:
    """List the checkpoints of a job, the newest first; each answers to its model's name."""
    await _job(service, caller, job_id)
    page = Page(after, limit, is_rising=False)
    found = await service.part(Files).read(lambda one: event_records.checkpoints(one, job_id, page))
    return _page(found, limit, checkpoint_of)


def _page(found: Sequence[Record], limit: int, show: Callable[[Record], Shown]) -> ListPage[Shown]:
    """Return a page of what was found, which has one more where there are others."""
    data = [show(one) for one in found[:limit]]
    ids = [str(one.model_dump(include={"id"})["id"]) for one in data]
    first, last = (ids[0], ids[-1]) if ids else (None, None)
    return ListPage(data=data, first_id=first, last_id=last, has_more=len(found) > limit)


async def _job(service: Service, caller: Caller, id: str) -> JobRecord:
    found = await service.part(Files).read(lambda one: records.find(one, id, caller.tenant))
    if found is None:
        raise missing("FineTuningJob", id)
    return found


async def _start(service: Service, caller: Caller, model: str) -> Path | None:
    """Return the folder of the model that a job goes on from; None for the base.

    Raises:
        ApiError: there is no such model for the caller, or no job made it.
    """
    if model in service.part(Catalog).names:
        return None
    kept = service.part(Catalog).kept
    assert kept is not None
    if kept.has(caller.tenant, model):  # and not one that another tenant shares
        return service.part(Files).store.folder / kept.of(caller.tenant)[model].folder
    await service.part(Catalog).find(caller, model)
    raise ApiError(
        400,
        "Fine-tuning goes on from the base, or from a model or a checkpoint that one of your jobs "
        f"made; use `{service.part(Catalog).names[0]}` or such a model.",
        param="model",
        code=UNSUPPORTED,
    )


async def _file(service: Service, caller: Caller, id: str, param: str) -> FileRecord:
    """Return a file to train with. ApiError: there is none, or it is of another purpose."""
    try:
        found = await service.part(Files).find(caller.tenant, id)
    except ApiError as error:
        raise ApiError(404, str(error.detail), param=param) from None
    if found.purpose != "fine-tune":
        said = f"The file {id} is for '{found.purpose}'; use one of the purpose 'fine-tune'."
        raise ApiError(400, said, param=param)
    return found


def _check_width(service: Service, completions: int) -> None:
    """Raise an ApiError for a prompt with more completions than a tenant may have waiting."""
    most = service.options.queue_of(service.keys.tenants)
    if completions > most:
        said = f"compute_multiplier makes {completions} completions of a prompt; this server takes"
        raise ApiError(400, f"{said} {most} of a tenant: use less.", param="compute_multiplier")


def _name(service: Service, caller: Caller, suffix: str | None) -> str:
    """Return the name of a new model. ApiError: no adapter can have it, as it is too long."""
    parts = (
        "ft",
        service.part(Catalog).names[0],
        caller.tenant,
        suffix or "",
        secrets.token_hex(4),
    )
    name = ":".join(parts)
    try:
        engine_name(caller.tenant, checkpoint_name(name, MOST_STEPS))
    except AdapterError as error:
        raise ApiError(400, f"The model would have no name: {error}", param="suffix") from None
    return name
