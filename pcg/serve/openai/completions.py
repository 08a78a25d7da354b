"""/v1/completions: continuations of prompts."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from pcg.keys import Scope
from pcg.runtime.requests.request import Completion, RequestFields
from pcg.serve.errors import ApiError
from pcg.serve.json_bytes import json_bytes
from pcg.serve.long_body import LongBodyRoute
from pcg.serve.openai.absent_fields import AbsentOfCompletions
from pcg.serve.openai.call import Call
from pcg.serve.openai.chat.response_format import ResponseFormat, content_schema
from pcg.serve.openai.completion_events import CompletionEvents, Wanted
from pcg.serve.openai.completion_texts import ChoiceText
from pcg.serve.openai.field_names import FieldNames
from pcg.serve.openai.logprobs import CompletionLogprobs, TokenNames, prompt_logprobs
from pcg.serve.openai.sampling_fields import SamplingBody, SamplingDefaults, Whole
from pcg.serve.openai.usage import Usage, usage_of
from pcg.serve.openai.wire import Prompts, StreamOptions
from pcg.serve.security.caller import Caller, requires
from pcg.serve.service import Service, ServiceDependency, Submitted, new_id

router = APIRouter(prefix="/v1", tags=["completions"], route_class=LongBodyRoute)

_DEFAULT_TOKENS = 16
"""OpenAI's default of max_tokens here."""


class CompletionBody(SamplingBody, AbsentOfCompletions):
    """A request for continuations; `user` has no effect."""

    prompt: Prompts
    add_special_tokens: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    echo: bool | None = None
    logprobs: Whole | None = None
    max_tokens: Whole | None = None
    model: str | None = None
    response_format: ResponseFormat | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    def names(self) -> FieldNames:
        """Return the names of fields that the engine has others for."""
        names = {"max_new_tokens": "max_tokens", "guided_json": "response_format"}
        return FieldNames("prompt", {**names, **self.guide_names()})

    def fields(self, request: Request, defaults: SamplingDefaults) -> RequestFields:
        """Return the fields of the engine's requests.

        Raises:
            ApiError: fields that do not go together.
        """
        if self.stream_options is not None and not self.stream:
            raise ApiError(
                400, "stream_options needs stream=true; leave it out", param="stream_options"
            )
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise ApiError(
                400, f"best_of={self.best_of} is below n={self.n}; raise it", param="best_of"
            )
        if self.stream and self.best_of is not None and self.best_of > (self.n or 1):
            raise ApiError(
                400,
                "best_of cannot be streamed: which are the best is known at the end; leave out "
                "stream or best_of",
                param="best_of",
            )
        found: dict[str, Any] = {**self.request_fields(request, defaults)}
        found["max_new_tokens"] = _DEFAULT_TOKENS if self.max_tokens is None else self.max_tokens
        if self.best_of is not None:
            found["best_of"] = self.best_of
        if self.echo is not None:
            found["echo"] = self.echo
        if self.logprobs is not None:
            found["logprobs"] = self.logprobs
        if self.add_special_tokens is not None:
            found["add_special_tokens"] = self.add_special_tokens
        schema = content_schema(self.response_format, self.guide())
        if schema is not None:
            found["guided_json"] = schema
        return found  # type: ignore[return-value]


class Choice(BaseModel):
    """A continuation. The ids of tokens are there where the request asks for them."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None
    prompt_logprobs: list[dict[str, dict[str, Any]] | None] | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionReply(BaseModel):
    """Continuations, those of the first prompt first.

    `system_fingerprint` is the version that answered: an adapter's is NAME@NUMBER.
    """

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[Choice]
    usage: Usage


STREAMED = {
    "description": "With `stream`: server-sent events, each a part of a reply.",
    "content": {"text/event-stream": {"schema": {"type": "string"}}},
}


@router.post("/completions", response_model=CompletionReply, responses={200: STREAMED})
async def create_completion(
    body: CompletionBody,
    request: Request,
    service: ServiceDependency,
    caller: Annotated[Caller, Depends(requires(Scope.INFER))],
) -> Response:
    """Continue prompts, given as texts or as token ids."""
    call = await Call.of(service, request, caller, body)
    reply_id = new_id("cmpl")
    fields = body.fields(request, service.generation.defaults)
    submitted = await call.submit(
        body.prompt, fields, reply_id, repeats_ids=bool(body.return_token_ids)
    )
    head = call.head("text_completion", reply_id, body.request_id)
    names = TokenNames(service.token_texts, bool(body.return_tokens_as_token_ids))
    if body.stream:
        wanted = Wanted.of(
            bool(body.return_token_ids), body.prompt_logprobs is not None, body.stream_options
        )
        return await call.stream(
            submitted, CompletionEvents(service, head, submitted, names, wanted)
        )
    groups = await call.completions(submitted)
    pairs = [
        (asked, done) for asked, group in zip(submitted, groups, strict=True) for done in group
    ]

    def content() -> bytes:
        write = partial(_choice, service, body, names)
        choices = [write(index, *pair) for index, pair in enumerate(pairs)]
        return json_bytes({**head, "choices": choices, "usage": usage_of(groups)})

    return await call.reply(content)


def _choice(
    service: Service,
    body: CompletionBody,
    names: TokenNames,
    index: int,
    asked: Submitted,
    done: Completion,
) -> dict[str, Any]:
    """Return a continuation as JSON."""
    choice: dict[str, Any] = {
        "index": index,
        "text": done.text,
        "logprobs": None,
        "finish_reason": done.finish_reason,
        "stop_reason": done.stop_reason,
    }
    if done.logprobs is not None:
        text = ChoiceText(service.client.tokenizer, asked.request)
        choice["logprobs"] = text.logprobs(done, names)
    if body.prompt_logprobs is not None and done.prompt_logprobs is not None:
        choice["prompt_logprobs"] = prompt_logprobs(done.prompt_logprobs, service.token_texts)
    if body.return_token_ids:
        choice["token_ids"] = list(done.token_ids)
        choice["prompt_token_ids"] = list(asked.request.prompt_ids)
    return choice
