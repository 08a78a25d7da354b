"""/v1/fine_tuning: OpenAI's fine-tuning jobs, their reports and permissions."""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import HTMLResponse
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Json

from pcg.errors import AdapterError, StoreDamagedError
from pcg.records.page import run_page
from pcg.records.record import MOST_BYTES
from pcg.records.run import read_run
from pcg.records.run_files import METRICS, has_run
from pcg.serve.adapters.catalog import Catalog
from pcg.serve.adapters.kept_models import KeptModels
from pcg.serve.engine.engine_names import engine_name
from pcg.serve.engine.messages import SUPERVISED
from pcg.serve.files.files import FileRecord, Files, ListPage, Page, missing
from pcg.serve.http.caller import Admin, Caller, Trainer
from pcg.serve.http.errors import UNSUPPORTED, ApiError, not_found
from pcg.serve.http.service import LongBodyRoute, Service, ServiceDependency, part
from pcg.serve.http.wire import WireModel, page_headers
from pcg.serve.jobs import records
from pcg.serve.jobs.folders import JobFolder, folder_of
from pcg.serve.jobs.graders import usable_grader
from pcg.serve.jobs.progress import checkpoint_name
from pcg.serve.jobs.records import (
    CHECKPOINT,
    EVENTS,
    MESSAGE,
    PERMISSIONS,
    QUEUED,
    SUCCEEDED,
    JobRecord,
    PermissionRecord,
)
from pcg.serve.jobs.runner import JobRunner
from pcg.serve.jobs.settings import (
    MOST_STEPS,
    JobBody,
    PcgSettings,
    Reinforcement,
    ReinforcementHyperparameters,
    count_rows,
    resolve,
    resolve_reinforcement,
)
from pcg.serve.store.tables import data_name, new_key, now

router = APIRouter(prefix="/v1/fine_tuning", tags=["fine-tuning"], route_class=LongBodyRoute)

FilesPart = Annotated[Files, part(Files)]
Runner = Annotated[JobRunner, part(JobRunner)]
After = Annotated[str | None, Query(max_length=128)]
Limit = Annotated[int, Query(ge=1, le=100)]

_MOST_JOBS = 64
"""The most unfinished jobs of a tenant."""
_MOST_PAIRS = 16
_METADATA = re.compile(r"metadata\[(.{1,64})\]", re.DOTALL)


class JobError(BaseModel):
    """The reason why a job failed."""

    code: str
    message: str
    param: str | None


class Resolved(BaseModel):
    """Resolved hyperparameters, without `auto`; extra fields are those of the method."""

    model_config = ConfigDict(extra="allow")

    n_epochs: int
    batch_size: int
    learning_rate_multiplier: float


class ResolvedOptions(BaseModel):
    """The method's resolved options."""

    hyperparameters: Resolved


class ResolvedReinforcement(ResolvedOptions):
    """The method's resolved options, with the grader."""

    grader: dict[str, Any]


class ResolvedMethod(BaseModel):
    """The method of a job, with its options."""

    type: str
    supervised: ResolvedOptions | None = None
    dpo: ResolvedOptions | None = None
    kto: ResolvedOptions | None = None
    reinforcement: ResolvedReinforcement | None = None


class Job(BaseModel):
    """A job. `pcg` has the whole resolved configuration."""

    id: str
    object: Literal["fine_tuning.job"] = "fine_tuning.job"
    created_at: int = Field(validation_alias="created_s")
    finished_at: int | None = Field(validation_alias="finished_s")
    model: str
    fine_tuned_model: str | None
    organization_id: str = Field(validation_alias="tenant")
    status: str
    training_file: str
    validation_file: str | None
    result_files: list[str]
    trained_tokens: int | None
    seed: int
    hyperparameters: Resolved
    method: ResolvedMethod
    metadata: Json[dict[str, str]] | None
    error: Json[JobError] | None
    integrations: list[Any] = []
    estimated_finish: int | None = None
    pcg: dict[str, Any]


class DeletedJob(BaseModel):
    """A deleted job."""

    id: str
    object: Literal["fine_tuning.job"] = "fine_tuning.job"
    deleted: Literal[True] = True


class Event(BaseModel):
    """An event of a job."""

    model_config = ConfigDict(from_attributes=True)

    id: str
    object: Literal["fine_tuning.job.event"] = "fine_tuning.job.event"
    created_at: int = Field(validation_alias="created_s")
    level: str
    type: Annotated[
        Literal["message", "metrics"],
        BeforeValidator(lambda type: MESSAGE if type == CHECKPOINT else type),
    ]
    message: str
    data: Json[dict[str, Any]] | None


class Checkpoint(BaseModel):
    """A checkpoint of a job, served under the name of its model."""

    model_config = ConfigDict(from_attributes=True)

    id: str
    object: Literal["fine_tuning.job.checkpoint"] = "fine_tuning.job.checkpoint"
    created_at: int = Field(validation_alias="created_s")
    fine_tuned_model_checkpoint: str = Field(validation_alias="model")
    fine_tuning_job_id: str = Field(validation_alias="job")
    step_number: int = Field(validation_alias="step")
    metrics: Json[dict[str, float]]


class PermissionBody(WireModel):
    """The tenants, OpenAI's projects, that may use a model."""

    project_ids: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=128)]],
        Field(min_length=1, max_length=64),
    ]


class CheckpointPermission(BaseModel):
    """A permission."""

    model_config = ConfigDict(from_attributes=True)

    id: str
    object: Literal["checkpoint.permission"] = "checkpoint.permission"
    created_at: int = Field(validation_alias="created_s")
    project_id: str = Field(validation_alias="project")


class DeletedPermission(BaseModel):
    """A deleted permission."""

    id: str
    object: Literal["checkpoint.permission"] = "checkpoint.permission"
    deleted: Literal[True] = True


@router.post("/jobs")
async def create_job(
    body: JobBody, service: ServiceDependency, caller: Trainer, files: FilesPart, runner: Runner
) -> Job:
    """Create a job; check its files line by line, and resolve `auto` settings."""
    method, options = body.method_options()
    settings = body.pcg or PcgSettings()
    is_rewarded = isinstance(options, Reinforcement)
    hyper = ReinforcementHyperparameters if is_rewarded else type(options)
    overrides = settings.options(method, hyper)
    if overrides.get("chat_template") is not None and not runner.trusts_templates:
        raise ApiError(
            400,
            "pcg.chat_template is not accepted: a template is a program. The operator may allow it "
            "by --trust-request-chat-template.",
            param="pcg.chat_template",
        )
    if (why := service.client.facts.no_jobs) is not None:
        raise ApiError(400, f"This server runs no jobs. {why}.", code="unsupported")
    start = await _start(service, files, caller, body.model)
    if isinstance(options, Reinforcement):
        await usable_grader(service, caller, options.grader, "method.reinforcement.grader")
    training = await _file(files, caller, body.training_file, "training_file")
    ids = [] if body.validation_file is None else [("validation_file", body.validation_file)]
    if settings.eval_data is not None:
        if ids:
            message = "Give validation_file or pcg.eval_data, not both."
            raise ApiError(400, message, param="validation_file")
        ids = [(f"pcg.eval_data.{name}", id) for name, id in settings.eval_data.items()]
    validation = [await _file(files, caller, id, param) for param, id in ids]
    data = [training, *validation]
    id = new_key("ftjob-")
    folder = folder_of(files.store, id)
    try:
        try:
            digests, contents = [file.digest for file in data], files.store.contents
            await service.beside(caller, folder.make, contents, digests, start)
        except StoreDamagedError:
            for file in data:
                await files.find(caller.tenant, file.id)  # raises a 404 if a file was deleted
            raise
        params = ["training_file", *(param for param, _ in ids)]
        counts = [
            await service.beside(
                caller, count_rows, folder.path / data_name(index), param, method, overrides
            )
            for index, param in enumerate(params)
        ]
        examples, tests = counts[0], sum(counts[1:])
        continued = None if start is None else body.model
        if isinstance(options, Reinforcement):
            most = service.max_model_len
            config = resolve_reinforcement(
                options, settings, overrides, examples, tests, most_tokens=most, start=continued
            )
            _check_width(service, config["options"]["grpo"]["num_generations"])
        else:
            evaluates = bool(validation)
            arguments = settings, overrides, examples, method, continued
            config = resolve(options, *arguments, evaluates=evaluates)
        text = json.dumps(config)
        record = JobRecord(
            id,
            caller.tenant,
            body.model,
            name=_name(service, caller, body.suffix),
            status=QUEUED,
            created_s=now(),
            finished_s=None,
            training_file=training.id,
            validation_file=body.validation_file,
            seed=secrets.randbelow(2**31) if body.seed is None else body.seed,
            metadata=json.dumps(body.metadata) if body.metadata else None,
            config=text,
            base=service.client.facts.base_digest,
            config_bytes=len(text),
        )
        held = [(file.digest, file.size_bytes) for file in data]
        return _job(await runner.create(record, _MOST_JOBS, held))
    except Exception:  # not on cancellation: the job may exist
        folder.remove()
        raise


@router.get("/jobs")
async def list_jobs(
    request: Request,
    caller: Trainer,
    files: FilesPart,
    after: After = None,
    limit: Limit = 20,
    metadata: Annotated[str | None, Query(max_length=8)] = None,
) -> ListPage[Job]:
    """List the tenant's jobs, newest first; filter by `metadata[k]=v` or `metadata=null`."""
    if metadata not in (None, "null"):
        raise ApiError(400, "Use metadata[KEY]=VALUE, or metadata=null.", param="metadata")
    pairs = {}
    for name, value in request.query_params.multi_items():
        if not name.startswith("metadata["):
            continue
        key = _METADATA.fullmatch(name)
        if key is None:
            message = "Use metadata[KEY]=VALUE with a key of 1 to 64 characters."
            raise ApiError(400, message, param="metadata")
        pairs[key[1]] = value
    if len(pairs) > _MOST_PAIRS:
        raise ApiError(400, f"Use at most {_MOST_PAIRS} pairs.", param="metadata")
    page, without = Page(after, limit), metadata is not None
    rows = await files.read(
        lambda db: records.listed(db, caller.tenant, page, pairs, without_metadata=without)
    )
    shown = [_job(row) for row in rows]
    return page.shown(shown, Job)


async def _of_caller(job_id: str, caller: Trainer, files: FilesPart) -> JobRecord:
    record = await files.read(lambda db: records.find(db, job_id, caller.tenant))
    if record is None:
        raise missing("FineTuningJob", job_id)
    return record


OwnJob = Annotated[JobRecord, Depends(_of_caller)]


@router.get("/jobs/{job_id}")
async def get_job(job: OwnJob) -> Job:
    """Return a job."""
    return _job(job)


@router.delete("/jobs/{job_id}")
async def delete_job(job: OwnJob, runner: Runner) -> DeletedJob:
    """Delete a finished job, with its events and checkpoint rows; its models stay."""
    await runner.remove(job)
    return DeletedJob(id=job.id)


@router.post("/jobs/{job_id}/cancel")
async def cancel_job(job: OwnJob, runner: Runner) -> Job:
    """Cancel a job; its checkpoints stay."""
    return _job(await runner.cancel(job))


@router.post("/jobs/{job_id}/pause")
async def pause_job(job: OwnJob, runner: Runner) -> Job:
    """Pause a job after its step, with a checkpoint."""
    return _job(await runner.pause(job))


@router.post("/jobs/{job_id}/resume")
async def resume_job(job: OwnJob, runner: Runner) -> Job:
    """Continue a paused job."""
    return _job(await runner.resume(job))


@router.get("/jobs/{job_id}/events")
async def list_events(
    job: OwnJob, files: FilesPart, after: After = None, limit: Limit = 20
) -> ListPage[Event]:
    """List the events of a job, the newest first."""
    page = Page(after, limit)
    condition, values = page.condition()
    rows = await files.read(lambda db: EVENTS.select(db, condition, values, page.order, job=job.id))
    return page.shown(rows, Event)


@router.get("/jobs/{job_id}/checkpoints")
async def list_checkpoints(
    job: OwnJob, files: FilesPart, after: After = None, limit: Limit = 10
) -> ListPage[Checkpoint]:
    """List the checkpoints of a job, the newest first; each is served under its model's name."""
    page = Page(after, limit)
    rows = await files.read(lambda db: records.checkpoints(db, job.id, page))
    return page.shown(rows, Checkpoint)


@router.get(
    "/jobs/{job_id}/report",
    response_class=Response,  # errors are JSON
    responses={200: {"content": {"text/html": {}}}},
)
async def job_report(
    job: OwnJob, service: ServiceDependency, caller: Trainer, files: FilesPart
) -> HTMLResponse:
    """Return the page of a job: its curves, and its resolved configuration."""
    page = await service.beside(caller, _report, job, folder_of(files.store, job.id))
    return HTMLResponse(page, headers=page_headers(page))


def _report(job: JobRecord, folder: JobFolder) -> str:
    """Return a job's page, without the server's paths.

    Raises:
        ApiError: the job has not started, or has too many steps for a page.
    """
    if not has_run(folder.record):
        raise ApiError(404, "The job has no report yet: it has not started.", param="id")
    try:
        if (folder.record / METRICS).stat().st_size > MOST_BYTES:
            message = "The job has too many steps for a page; list its events."
            raise ApiError(400, message, param="id")
        run, resolved = read_run(folder.record), job.resolved
    except FileNotFoundError:  # the job was deleted
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


async def _start(service: Service, files: Files, caller: Caller, model: str) -> Path | None:
    """Return the folder of the model that a job continues; None for the base.

    Raises:
        ApiError: the caller has no such model, or it is not from a job.
    """
    catalog = service.part(Catalog)
    if model in catalog.names:
        return None
    kept = catalog.kept
    assert kept is not None
    if kept.has(caller.tenant, model):  # excludes models that other tenants share
        return files.store.folder / kept.of(caller.tenant)[model].folder
    await catalog.find(caller, model)
    raise ApiError(
        400,
        "Fine-tuning starts from the base, or from a model or a checkpoint of one of your jobs; "
        f"use `{catalog.names[0]}` or such a model.",
        param="model",
        code=UNSUPPORTED,
    )


async def _file(files: Files, caller: Caller, id: str, param: str) -> FileRecord:
    try:
        record = await files.find(caller.tenant, id)
    except ApiError as error:
        raise ApiError(404, str(error.detail), param=param) from None
    if record.purpose != "fine-tune":
        message = f"The file {id} is for '{record.purpose}'; use one of the purpose 'fine-tune'."
        raise ApiError(400, message, param=param)
    return record


def _check_width(service: Service, completions: int) -> None:
    """Raise an ApiError for more completions of a prompt than a tenant may have waiting."""
    most = service.options.queue_of(service.keys.tenants)
    if completions > most:
        message = (
            f"compute_multiplier needs {completions} completions of a prompt; a tenant may have"
        )
        raise ApiError(400, f"{message} {most}: use less.", param="compute_multiplier")


def _name(service: Service, caller: Caller, suffix: str | None) -> str:
    """Return the name of a new model. ApiError: it is too long for an adapter."""
    base, random = service.part(Catalog).names[0], secrets.token_hex(4)
    name = ":".join(("ft", base, caller.tenant, suffix or "", random))
    try:
        engine_name(caller.tenant, checkpoint_name(name, MOST_STEPS))
    except AdapterError as error:
        raise ApiError(400, f"The model's name is invalid: {error}", param="suffix") from None
    return name


def _job(record: JobRecord) -> Job:
    config = record.resolved
    type, hyperparameters = config.get("method", SUPERVISED), config["hyperparameters"]
    options = {"hyperparameters": hyperparameters, "grader": config.get("grader")}
    resolved = {
        "fine_tuned_model": record.name if record.status == SUCCEEDED else None,
        "result_files": [] if record.result_file is None else [record.result_file],
        "hyperparameters": hyperparameters,
        "method": {"type": type, type: options},
        "pcg": {
            **{name: config[name] for name in ("peft", "options", "examples", "total_steps")},
            "eval_data": config.get("eval_data"),
        },
    }
    return Job.model_validate({**vars(record), **resolved})


async def _kept(
    model: str, caller: Admin, files: FilesPart, catalog: Annotated[Catalog, part(Catalog)]
) -> KeptModels:
    kept = catalog.kept
    if kept is None or not kept.has(caller.tenant, model):
        raise not_found(model)
    return kept


Kept = Annotated[KeptModels, Depends(_kept)]
_PERMISSIONS = "/checkpoints/{model:path}/permissions"


@router.post(_PERMISSIONS)
async def create_permissions(
    model: str, body: PermissionBody, caller: Admin, files: FilesPart, kept: Kept
) -> ListPage[CheckpointPermission]:
    """Let other tenants use a model of the key's tenant."""
    permissions = [
        PermissionRecord(new_key("cp_"), caller.tenant, model, project, now())
        for project in dict.fromkeys(body.project_ids)
    ]
    rows = await files.write(lambda db: records.permit(db, permissions))
    for row in rows:
        kept.share(row.tenant, row.model, row.project)
    return Page(None, len(rows)).shown(rows, CheckpointPermission)


@router.get(_PERMISSIONS, dependencies=[Depends(_kept)])
async def list_permissions(
    model: str,
    caller: Admin,
    files: FilesPart,
    after: After = None,
    limit: Limit = 10,
    order: Literal["ascending", "descending"] = "descending",
    project_id: Annotated[str | None, Query(max_length=128)] = None,
) -> ListPage[CheckpointPermission]:
    """List the permissions of a model, the newest first by default."""
    page = Page(after, limit, order == "ascending")
    condition, values = page.condition()
    equal = {"tenant": caller.tenant, "model": model}
    if project_id is not None:
        equal["project"] = project_id
    rows = await files.read(
        lambda db: PERMISSIONS.select(db, condition, values, page.order, **equal)
    )
    return page.shown(rows, CheckpointPermission)


@router.delete(_PERMISSIONS + "/{permission_id}")
async def delete_permission(
    model: str, permission_id: str, caller: Admin, files: FilesPart, kept: Kept
) -> DeletedPermission:
    """Withdraw a permission; running requests finish."""
    rows = await files.write(
        lambda db: PERMISSIONS.delete(db, tenant=caller.tenant, model=model, id=permission_id)
    )
    if not rows:
        raise missing("CheckpointPermission", permission_id)
    kept.unshare(model, rows[0].project)
    return DeletedPermission(id=permission_id)
