"""/v1/fine_tuning/alpha/graders, and the graders of jobs.

Model graders ask served models with the tenant's permissions and limits; Python graders run in a
sandbox, one at a time per tenant.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated, Any, ParamSpec, TypeVar
from weakref import WeakValueDictionary

from fastapi import APIRouter
from pydantic import BaseModel, Field

from pcg.errors import GradingError, PcgError, QueueFullError, UnsupportedError
from pcg.graders.grader import Answer, Failure, Grade, Grader, Question, all_of
from pcg.graders.reader import grader_from
from pcg.graders.rewards import rewards_of
from pcg.graders.sample import Sample
from pcg.graders.sandbox_runner import check_sandbox, run_grader
from pcg.graders.text_graders import PythonGrader
from pcg.keys import Scope
from pcg.runtime.requests.request import Completion
from pcg.serve.adapters.catalog import Catalog
from pcg.serve.engine.messages import JobSamples
from pcg.serve.http.caller import Caller, Trainer
from pcg.serve.http.errors import LOG, ApiError, as_api_error
from pcg.serve.http.service import LongBodyRoute, Service, ServiceDependency
from pcg.serve.http.wire import WireModel, new_id
from pcg.serve.jobs.records import JobRecord
from pcg.serve.openai.chat import Chat
from pcg.serve.openai.messages import Message, Template
from pcg.serve.openai.replies import check_ended
from pcg.serve.openai.sampling import of_engine
from pcg.serve.openai.tools import ChatSupport

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

MOST_BYTES = 2**18
"""Maximum size of a grader, bytes: jobs store it and parse it each step."""
_MOST_SAMPLE = 2**20
_PROCESSES = 2
"""Concurrent sandboxes; a tenant has at most one."""
_AGAIN_S = 0.2
"""Time before a request is submitted again to an engine with a full queue, seconds."""


class PythonGraders:
    """Runs tenants' Python graders, one at a time per tenant.

    Args:
        is_on: False to refuse Python graders.
    Raises:
        UnsupportedError: they are enabled, and this machine has no sandbox.
    """

    def __init__(self, is_on: bool) -> None:
        if is_on:
            check_sandbox()
        self.is_on = is_on
        self._threads = ThreadPoolExecutor(_PROCESSES, "pcg graders")
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def run(self, tenant: str, source: str, sample: Sample) -> float:
        """Run a source. GradingError: it fails, or Python graders are disabled.

        A job may have a grader from a time when they were enabled.
        """
        if not self.is_on:
            message = "this server runs no python graders; its operator may enable them"
            raise GradingError(message, "python_grader_server_error")
        turn = self._turns.get(tenant)
        if turn is None:
            turn = self._turns[tenant] = asyncio.Semaphore(1)
        await turn.acquire()
        try:
            loop = asyncio.get_running_loop()
            running = loop.run_in_executor(self._threads, run_grader, source, sample)
        except BaseException:
            turn.release()
            raise
        # A cancelled call still holds its turn until the process ends.
        running.add_done_callback(partial(_end_turn, turn))
        return await asyncio.shield(running)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)


def _end_turn(turn: asyncio.Semaphore, _: asyncio.Future[float]) -> None:
    turn.release()


class ServedHost:
    """Runs judges and sources of graders with the caller's permissions and limits.

    Args:
        waits: True to wait while the queue is full, as an error would spoil a job's reward.
    """

    def __init__(self, service: Service, caller: Caller, *, waits: bool = False) -> None:
        self._service = service
        self._caller = caller
        self._waits = waits

    async def check(self, grader: Grader) -> None:
        """Raise an error for a grader that the caller may not use."""
        for each in all_of(grader):
            is_on = self._service.part(PythonGraders).is_on
            if isinstance(each, PythonGrader) and not is_on:
                raise UnsupportedError(
                    f"the grader {each.name!r} is of the type 'python', which this server does not "
                    "run; its operator may enable it by --python-graders"
                )
            if each.judge is not None:
                if Scope.INFER not in self._caller.scopes:
                    raise ApiError(
                        403,
                        f"The grader asks a judge, and the key {self._caller.key!r} lacks the "
                        "scope 'infer'.",
                        code="insufficient_permissions",
                    )
                await self._service.part(Catalog).find(self._caller, each.judge)

    async def beside(
        self,
        act: Callable[Arguments, Result],
        *args: Arguments.args,
        **keywords: Arguments.kwargs,
    ) -> Result:
        return await self._service.beside(self._caller, act, *args, **keywords)

    async def run(self, source: str, sample: Sample) -> float:
        return await self._service.part(PythonGraders).run(self._caller.tenant, source, sample)

    async def ask(self, question: Question) -> Answer:
        while True:
            try:
                length, completion = await self._completion(question)
            except (ApiError, PcgError) as error:
                if self._waits and isinstance(error, QueueFullError):
                    await asyncio.sleep(_AGAIN_S)
                    continue
                message = str(as_api_error(error).detail)
                raise GradingError(message, "model_grader_server_error") from None
            return Answer(completion.text, length + len(completion.token_ids))

    async def _completion(self, question: Question) -> tuple[int, Completion]:
        service, caller = self._service, self._caller
        model = await service.part(Catalog).find(caller, question.model)
        messages = [Message.model_validate(message) for message in question.messages]
        effort = question.reasoning_effort
        variables = {} if effort is None else {"reasoning_effort": effort}
        chat = Chat(messages, template=Template(variables=variables))
        support, bound = service.part(ChatSupport), service.max_model_len
        prompt, _ = await service.beside(caller, chat.prompt, support, bound)
        room = await service.room(model) - len(prompt)
        fields: dict[str, Any] = {**question.sampling}
        fields["max_new_tokens"] = max(1, min(fields["max_new_tokens"], room))
        choices = None if question.choices is None else list(question.choices)
        guides = {"guided_json": question.schema, "guided_choice": choices}
        (submitted,) = await service.submit(
            caller, model, [prompt], of_engine(fields, guides), new_id("grade")
        )
        try:
            (completion,) = await submitted.stream.completions()
        finally:
            submitted.stream.cancel()
        check_ended(completion)
        return len(prompt), completion


async def usable_grader(
    service: Service, caller: Caller, grader: dict[str, Any], where: str = "grader"
) -> tuple[Grader, ServedHost]:
    """Parse and check a grader; return it with a host for the caller.

    Args:
        where: its field in the body, for errors.
    Raises:
        GraderError: it is invalid.
        ApiError: a judge is missing, or the caller may not use it.
        UnsupportedError: it is a Python grader, and they are disabled.
    """
    try:
        size = len(json.dumps(grader, ensure_ascii=False).encode())
    except UnicodeEncodeError:
        raise ApiError(400, f"{where} has an unpaired surrogate.", param=where) from None
    if size > MOST_BYTES:
        message = f"{where} has {size} bytes; use at most {MOST_BYTES}."
        raise ApiError(400, message, param=where, code="invalid_grader")
    parsed = await service.beside(caller, grader_from, grader, where)
    host = ServedHost(service, caller)
    await host.check(parsed)
    return parsed, host


class JobGrading:
    """Grades the completions of jobs.

    The scopes that a grader needs were checked when the job was created.
    """

    def __init__(self, service: Service) -> None:
        self._service = service

    async def grade(self, tenant: str, job: str, grader: Any, samples: JobSamples) -> list[float]:
        """Return a reward for each completion, 0 if it cannot be graded.

        Raises:
            GraderError: no completion can be graded; the text is the first error.
        """
        caller = Caller(job, tenant, frozenset({Scope.INFER, Scope.TRAIN}))
        parsed = await self._service.beside(caller, grader_from, grader)
        host = ServedHost(self._service, caller, waits=True)
        pairs = zip(samples.texts, samples.items, strict=True)
        return await rewards_of(parsed, [Sample(text, item) for text, item in pairs], host)


async def graded(
    grading: JobGrading, job: JobRecord, samples: JobSamples
) -> tuple[list[float], str | None]:
    """Return the rewards of a job's completions, or an error text."""
    try:
        return await grading.grade(job.tenant, job.id, job.resolved["grader"], samples), None
    except PcgError as error:
        return [], str(error).encode(errors="replace").decode()  # without unpaired surrogates
    except Exception as error:
        LOG.error("the grader of job %s failed", job.id, exc_info=error)
        return [], "the grader failed"


class GraderBody(WireModel):
    """A grader to validate; `pcg.graders` parses it."""

    grader: dict[str, Any]


class RunBody(GraderBody):
    """A grader with a sample to grade, and the sample's row of data."""

    model_sample: Annotated[str, Field(max_length=_MOST_SAMPLE)]
    item: Any = None


class ValidGrader(BaseModel):
    """A valid grader, unchanged."""

    grader: dict[str, Any]


class GradeErrors(BaseModel):
    """The reasons of a missing reward."""

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
    """The grader of a grade, its scores by name, and its errors."""

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


router = APIRouter(
    prefix="/v1/fine_tuning/alpha/graders", tags=["fine-tuning"], route_class=LongBodyRoute
)


@router.post("/run", name="run_grader")
async def run_sample(body: RunBody, service: ServiceDependency, caller: Trainer) -> GradeReply:
    """Grade a sample; errors are in the metadata."""
    grader, host = await usable_grader(service, caller, body.grader)
    return _reply(await grader.grade(Sample(body.model_sample, body.item), host))


@router.post("/validate")
async def validate_grader(
    body: GraderBody, service: ServiceDependency, caller: Trainer
) -> ValidGrader:
    """Check that the caller can use a grader, and return it."""
    await usable_grader(service, caller, body.grader)
    return ValidGrader(grader=body.grader)


def _reply(grade: Grade) -> GradeReply:
    grader = grade.grader
    subs = {name: each.reward for name, each in grade.subs.items()}
    judges = {each.judge for each in all_of(grader) if each.judge is not None}
    metadata = GradeMetadata(
        name=grader.name,
        type=grader.type,
        execution_time=grade.seconds,
        scores={**subs, grader.name: grade.reward},
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
    errors: dict[str, Any] = {failure.kind: True for failure in failures}
    for kind, text in (
        ("model_grader_server_error", "model_grader_server_error_details"),
        ("python_grader_runtime_error", "python_grader_runtime_error_details"),
        ("python_grader_server_error", "python_grader_server_error_type"),
    ):
        errors[text] = next((each.text for each in failures if each.kind == kind), None)
    return GradeErrors(**errors, details=[failure.text for failure in failures])
