"""/v1/fine_tuning/alpha/graders: a grader is tried, or looked at.

Graders and grades as clients see them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from pydantic import BaseModel, Field

from pcg.graders.grader import Failure, Grade, all_of
from pcg.graders.sample import Sample
from pcg.keys import Scope
from pcg.serve.graders.host import usable_grader
from pcg.serve.http.caller import Caller, requires
from pcg.serve.http.service import LongBodyRoute, ServiceDependency
from pcg.serve.http.wire import WireModel

# --------------------------------------------------------------------------------------------- wire


_MOST_SAMPLE = 2**20


class GraderBody(WireModel):
    """A grader to validate; `pcg.graders` reads it."""

    grader: dict[str, Any]


class RunBody(GraderBody):
    """A grader with a sample to grade, and the row of data that it answers."""

    model_sample: Annotated[str, Field(max_length=_MOST_SAMPLE)]
    item: Any = None


class ValidGrader(BaseModel):
    """A grader that can be used, as it was given."""

    grader: dict[str, Any]


class GradeErrors(BaseModel):
    """The reasons why there is no reward."""

    formula_parse_error: bool = False
    invalid_variable_error: bool = False
    model_grader_parse_error: bool = False
    model_grader_refusal_error: bool = False
    model_grader_server_error: bool = False
    model_grader_server_error_details: str | None = None
    other_error: bool = False
    python_grader_runtime_error: bool = False
    python_grader_runtime_error_details: str | None = None
    python_grader_server_error: bool = False
    python_grader_server_error_type: str | None = None
    sample_parse_error: bool = False
    truncated_observation_error: bool = False
    unresponsive_reward_error: bool = False
    details: list[str] = []


class GradeMetadata(BaseModel):
    """The grader of a grade, its scores by name, and what failed."""

    name: str
    type: str
    execution_time: float
    scores: dict[str, float]
    errors: GradeErrors
    sampled_model_name: str | None = None
    token_usage: int | None = None


class GradeReply(BaseModel):
    """The grade of a sample."""

    reward: float
    sub_rewards: dict[str, float]
    metadata: GradeMetadata
    model_grader_token_usage_per_model: dict[str, int]


def grade_reply(grade: Grade) -> GradeReply:
    """Return a grade as clients see it."""
    grader = grade.grader
    scores = {grader.name: grade.reward}
    subs = {name: one.reward for name, one in grade.subs.items()}
    judges = {one.judge for one in all_of(grader) if one.judge is not None}
    metadata = GradeMetadata(
        name=grader.name,
        type=grader.type,
        execution_time=grade.seconds,
        scores={**subs, **scores},
        errors=_errors(grade.failures),
        sampled_model_name=judges.pop() if len(judges) == 1 else None,
        token_usage=sum(grade.tokens.values()) if grade.tokens else None,
    )
    return GradeReply(
        reward=grade.reward,
        sub_rewards=subs,
        metadata=metadata,
        model_grader_token_usage_per_model=dict(grade.tokens),
    )


def _errors(failures: Sequence[Failure]) -> GradeErrors:
    """Return the object of OpenAI's errors; `details` has the texts of all."""
    found: dict[str, Any] = {failure.kind: True for failure in failures}
    for kind, text in (
        ("model_grader_server_error", "model_grader_server_error_details"),
        ("python_grader_runtime_error", "python_grader_runtime_error_details"),
        ("python_grader_server_error", "python_grader_server_error_type"),
    ):
        found[text] = next((one.text for one in failures if one.kind == kind), None)
    return GradeErrors(**found, details=[failure.text for failure in failures])


# ------------------------------------------------------------------------------------------- routes


router = APIRouter(
    prefix="/v1/fine_tuning/alpha/graders", tags=["fine-tuning"], route_class=LongBodyRoute
)

Trainer = Annotated[Caller, Depends(requires(Scope.TRAIN))]


@router.post("/run")
async def run_grader(body: RunBody, service: ServiceDependency, caller: Trainer) -> GradeReply:
    """Grade a sample; what fails about it is in the metadata's errors."""
    grader, host = await usable_grader(service, caller, body.grader)
    grade = await grader.grade(Sample(body.model_sample, body.item), host)
    return grade_reply(grade)


@router.post("/validate")
async def validate_grader(
    body: GraderBody, service: ServiceDependency, caller: Trainer
) -> ValidGrader:
    """Return a grader, if it can be used here."""
    await usable_grader(service, caller, body.grader)
    return ValidGrader(grader=body.grader)
