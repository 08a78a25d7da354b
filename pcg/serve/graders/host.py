"""The host of a tenant's graders: judges are served models, and source runs in the sandbox."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from pcg.errors import GradingError, PcgError, QueueFullError, UnsupportedError
from pcg.graders.grader import Answer, Grader, Question, all_of
from pcg.graders.reader import grader_from
from pcg.graders.sample import Sample
from pcg.graders.text_graders import PythonGrader
from pcg.keys import Scope
from pcg.runtime.requests.request import Completion, RequestFields
from pcg.serve.adapters.catalog import Catalog
from pcg.serve.graders.python_graders import PythonGraders
from pcg.serve.http.caller import Caller
from pcg.serve.http.errors import ApiError, as_api_error
from pcg.serve.http.service import Service
from pcg.serve.http.wire import new_id
from pcg.serve.openai.chat import Chat
from pcg.serve.openai.messages import Message, Template
from pcg.serve.openai.replies import check_ended
from pcg.serve.openai.tools import ChatSupport

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

MOST_BYTES = 2**18
"""The most bytes of a grader with all that it is made of: jobs keep it, and read it each step."""
_AGAIN_S = 0.2
"""Time after which an engine that has too much waiting is asked again, seconds."""


class ServedHost:
    """Grades for one caller, whose rights and bounds its judges' requests have.

    Args:
        waits: True to ask again while too much waits, as where a job would learn from the error.
    """

    def __init__(self, service: Service, caller: Caller, *, waits: bool = False) -> None:
        self._service = service
        self._caller = caller
        self._waits = waits

    async def check(self, grader: Grader) -> None:
        """Raise an ApiError for a grader that the caller may not use here."""
        for one in all_of(grader):
            if isinstance(one, PythonGrader) and not self._service.part(PythonGraders).is_on:
                raise UnsupportedError(
                    f"the grader {one.name!r} is of the type 'python', which this server does not "
                    "run; its operator may switch them on by --python-graders"
                )
            if one.judge is not None:
                if Scope.INFER not in self._caller.scopes:
                    raise ApiError(
                        403,
                        f"The grader asks a judge, and the key {self._caller.key!r} lacks the "
                        "scope 'infer'.",
                        code="insufficient_permissions",
                    )
                await self._service.part(Catalog).find(self._caller, one.judge)

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
                length, done = await self._completion(question)
            except (ApiError, PcgError) as error:
                if self._waits and isinstance(error, QueueFullError):
                    await asyncio.sleep(_AGAIN_S)
                    continue
                found = as_api_error(error)
                raise GradingError(str(found.detail), "model_grader_server_error") from None
            return Answer(done.text, length + len(done.token_ids))

    async def _completion(self, question: Question) -> tuple[int, Completion]:
        """Return the tokens of the question, and the judge's answer."""
        service, caller = self._service, self._caller
        model = await service.part(Catalog).find(caller, question.model)
        messages = [Message(**one) for one in question.messages]  # type: ignore[arg-type]
        effort = question.reasoning_effort
        variables = {} if effort is None else {"reasoning_effort": effort}
        chat = Chat(messages, template=Template(variables=variables))
        support, bound = service.part(ChatSupport), service.max_model_len
        prompt, _ = await service.beside(caller, chat.prompt, support, bound)
        room = await service.room(model) - len(prompt)
        fields: dict[str, Any] = {**question.sampling}
        fields["max_new_tokens"] = max(1, min(fields["max_new_tokens"], room))
        if question.schema is not None:
            fields["guided_json"] = question.schema
        if question.choices is not None:
            fields["guided_choice"] = list(question.choices)
        asked: RequestFields = fields  # type: ignore[assignment]
        (submitted,) = await service.submit(caller, model, [prompt], asked, new_id("grade"))
        try:
            (done,) = await submitted.stream.completions()
        finally:
            submitted.stream.cancel()
        check_ended(done)
        return len(prompt), done


async def usable_grader(
    service: Service, caller: Caller, given: dict[str, Any], where: str = "grader"
) -> tuple[Grader, ServedHost]:
    """Return a grader, and the host that grades for the caller.

    Args:
        where: its place in the body, which errors name.
    Raises:
        GraderError: it cannot be.
        ApiError: a judge is not there, or the caller may not ask one.
        UnsupportedError: it is python, which is switched off.
    """
    try:
        size = len(json.dumps(given, ensure_ascii=False).encode())
    except UnicodeEncodeError:
        raise ApiError(400, f"{where} has half a character.", param=where) from None
    if size > MOST_BYTES:
        said = f"{where} has {size} bytes; use at most {MOST_BYTES}."
        raise ApiError(400, said, param=where, code="invalid_grader")
    grader = await service.beside(caller, grader_from, given, where)
    host = ServedHost(service, caller)
    await host.check(grader)
    return grader, host
