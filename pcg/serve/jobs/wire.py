"""Jobs, their events and checkpoints, as clients see them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from pcg.serve.engine.news import DPO, REINFORCEMENT, SUPERVISED
from pcg.serve.http.errors import UNSUPPORTED, ApiError
from pcg.serve.http.wire import WireModel
from pcg.serve.jobs.event_records import CHECKPOINT, MESSAGE, CheckpointRecord, EventRecord
from pcg.serve.jobs.records import SUCCEEDED, JobRecord
from pcg.serve.jobs.reinforcement import Reinforcement
from pcg.serve.jobs.settings import DpoHyperparameters, Hyperparameters, PcgSettings

METHODS = (SUPERVISED, DPO, REINFORCEMENT)
Metadata = dict[
    Annotated[str, Field(min_length=1, max_length=64)], Annotated[str, Field(max_length=512)]
]


class Supervised(WireModel):
    """The method `supervised`."""

    hyperparameters: Hyperparameters | None = None


class Dpo(WireModel):
    """The method `dpo`."""

    hyperparameters: DpoHyperparameters | None = None


class Method(WireModel):
    """The method of a job; the options are those of its type."""

    type: Annotated[str, Field(max_length=64)]
    supervised: Supervised | None = None
    dpo: Dpo | None = None
    reinforcement: Reinforcement | None = None


class JobBody(WireModel):
    """A job to make. `pcg` has settings of our own; `integrations` have to be none."""

    model: Annotated[str, Field(max_length=512)]
    training_file: Annotated[str, Field(max_length=128)]
    validation_file: Annotated[str, Field(max_length=128)] | None = None
    suffix: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")] | None = None
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    hyperparameters: Hyperparameters | None = None
    method: Method | None = None
    metadata: Annotated[Metadata, Field(max_length=16)] | None = None
    integrations: list[Any] | None = None
    pcg: PcgSettings | None = None

    def given(self) -> tuple[str, Hyperparameters | Reinforcement]:
        """Return the method, and the hyperparameters, which are in one of two places.

        Raises:
            ApiError: they are in both, or the method is another one.
        """
        method = self.method or Method(type=SUPERVISED)
        if method.type not in METHODS:
            said = f"'{method.type}' is not one of {list(METHODS)}."
            raise ApiError(400, f"Invalid value for 'method.type': {said}", param="method.type")
        for name in METHODS:
            if name != method.type and getattr(method, name) is not None:
                said = f"method.{name} has no effect on a job of the type '{method.type}'."
                raise ApiError(400, said, param=f"method.{name}")
        if self.integrations:
            said = "integrations are not supported; leave them out."
            raise ApiError(400, said, param="integrations", code=UNSUPPORTED)
        if method.type == REINFORCEMENT:
            return method.type, self._reinforcement(method.reinforcement)
        options = method.dpo if method.type == DPO else method.supervised
        own = None if options is None else options.hyperparameters
        if own is not None and self.hyperparameters is not None:
            raise ApiError(
                400,
                f"Give hyperparameters or method.{method.type}.hyperparameters, not both.",
                param="hyperparameters",
            )
        kind = DpoHyperparameters if method.type == DPO else Hyperparameters
        shared = {} if self.hyperparameters is None else self.hyperparameters.model_dump()
        return method.type, own or kind(**shared)

    def _reinforcement(self, own: Reinforcement | None) -> Reinforcement:
        """Return the method's options, which have no other place."""
        name = f"method.{REINFORCEMENT}"
        if own is None:
            raise ApiError(400, f"Missing required parameter: '{name}'.", param=name)
        if self.hyperparameters is not None:
            said = f"Give {name}.hyperparameters in place of hyperparameters."
            raise ApiError(400, said, param="hyperparameters")
        return own


class JobError(BaseModel):
    """The reason why a job failed."""

    code: str
    message: str
    param: str | None


class Resolved(BaseModel):
    """Hyperparameters, none of which is `auto` any more; others are of methods."""

    model_config = ConfigDict(extra="allow")

    n_epochs: int
    batch_size: int
    learning_rate_multiplier: float


class ResolvedOptions(BaseModel):
    """The method's resolved options."""

    hyperparameters: Resolved


class ResolvedReinforcement(ResolvedOptions):
    """The method's resolved options."""

    grader: dict[str, Any]


class ResolvedMethod(BaseModel):
    """The method of a job, which alone has options."""

    type: str
    supervised: ResolvedOptions | None = None
    dpo: ResolvedOptions | None = None
    reinforcement: ResolvedReinforcement | None = None


class Job(BaseModel):
    """A job. `pcg` has its whole configuration, as it was resolved."""

    id: str
    object: Literal["fine_tuning.job"] = "fine_tuning.job"
    created_at: int
    finished_at: int | None
    model: str
    fine_tuned_model: str | None
    organization_id: str
    status: str
    training_file: str
    validation_file: str | None
    result_files: list[str]
    trained_tokens: int | None
    seed: int
    hyperparameters: Resolved
    method: ResolvedMethod
    metadata: dict[str, str] | None
    error: JobError | None
    integrations: list[Any] = []
    estimated_finish: int | None = None
    pcg: dict[str, Any]


class DeletedJob(BaseModel):
    """A job that is kept no more."""

    id: str
    object: Literal["fine_tuning.job"] = "fine_tuning.job"
    deleted: Literal[True] = True


class Event(BaseModel):
    """An event of a job."""

    id: str
    object: Literal["fine_tuning.job.event"] = "fine_tuning.job.event"
    created_at: int
    level: str
    type: Literal["message", "metrics"]
    message: str
    data: dict[str, Any] | None


class Checkpoint(BaseModel):
    """A checkpoint of a job, which answers to the name of its model."""

    id: str
    object: Literal["fine_tuning.job.checkpoint"] = "fine_tuning.job.checkpoint"
    created_at: int
    fine_tuned_model_checkpoint: str
    fine_tuning_job_id: str
    step_number: int
    metrics: dict[str, float]


def job_of(record: JobRecord) -> Job:
    """Return a job as clients see it."""
    config = record.resolved
    resolved = Resolved.model_validate(config["hyperparameters"])
    type = config.get("method", SUPERVISED)
    own = {"hyperparameters": resolved, "grader": config.get("grader")}
    method = ResolvedMethod.model_validate({"type": type, type: own})
    return Job(
        id=record.id,
        created_at=record.created_s,
        finished_at=record.finished_s,
        model=record.model,
        fine_tuned_model=record.name if record.status == SUCCEEDED else None,
        organization_id=record.tenant,
        status=record.status,
        training_file=record.training_file,
        validation_file=record.validation_file,
        result_files=[] if record.result_file is None else [record.result_file],
        trained_tokens=record.trained_tokens,
        seed=record.seed,
        hyperparameters=resolved,
        method=method,
        metadata=None if record.metadata is None else json.loads(record.metadata),
        error=None if record.error is None else JobError.model_validate_json(record.error),
        pcg={name: config[name] for name in ("peft", "options", "examples", "total_steps")},
    )


def event_of(record: EventRecord) -> Event:
    """Return an event as clients see it."""
    is_message = record.type in (MESSAGE, CHECKPOINT)
    return Event(
        id=record.id,
        created_at=record.created_s,
        level=record.level,
        type="message" if is_message else "metrics",
        message=record.message,
        data=None if record.data is None else json.loads(record.data),
    )


def checkpoint_of(record: CheckpointRecord) -> Checkpoint:
    """Return a checkpoint as clients see it."""
    return Checkpoint(
        id=record.id,
        created_at=record.created_s,
        fine_tuned_model_checkpoint=record.model,
        fine_tuning_job_id=record.job,
        step_number=record.step,
        metrics=json.loads(record.metrics),
    )
