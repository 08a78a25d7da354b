"""/v1/fine_tuning/alpha/graders: a grader is tried, or looked at."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends

from pcg.graders.sample import Sample
from pcg.keys import Scope
from pcg.serve.graders.host import usable_grader
from pcg.serve.graders.wire import GraderBody, GradeReply, RunBody, ValidGrader, grade_reply
from pcg.serve.long_body import LongBodyRoute
from pcg.serve.security.caller import Caller, requires
from pcg.serve.service import ServiceDependency

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
