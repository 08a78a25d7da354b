"""POST /v1/completions.

Usage: the tokens of a reply.

Places of tokens in a completion's text.

The events of a streamed completion.

    data: {"id", "object", "created", "model", "choices": [{"index", "text", "logprobs",
           "finish_reason", "stop_reason"}], "usage": null}
    data: {…, "choices": [], "usage": {…}}                    with stream_options.include_usage
    data: [DONE]

All events of one step of the engine are sent together.

/v1/completions: continuations of prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends
from fastapi import Request as HttpRequest
from pydantic import BaseModel, Field
from starlette.responses import Response

from pcg.keys import Scope
from pcg.runtime.requests.request import Chunk, Completion, Request, RequestFields
from pcg.runtime.sampling.logprobs import TokenLogprobs
from pcg.runtime.text.tokenizer import Tokenizer
from pcg.serve.http.caller import Caller, requires
from pcg.serve.http.errors import ApiError
from pcg.serve.http.service import LongBodyRoute, Service, ServiceDependency, Submitted
from pcg.serve.http.wire import json_bytes, new_id
from pcg.serve.openai.call import Call
from pcg.serve.openai.event_stream import Events, check_ended, event
from pcg.serve.openai.generation_config import GenerationConfig
from pcg.serve.openai.logprobs import (
    CompletionLogprobs,
    TokenNames,
    TokenTexts,
    completion_logprobs,
    prompt_logprobs,
)
from pcg.serve.openai.sampling_fields import (
    ResponseFormat,
    SamplingBody,
    SamplingDefaults,
    Whole,
    content_schema,
)
from pcg.serve.openai.wire import AbsentOfCompletions, FieldNames, Prompts, StreamOptions

# -------------------------------------------------------------------------------------------- usage


class PromptTokensDetails(BaseModel):
    """Tokens of prompts that the KV cache had."""

    cached_tokens: int


class Usage(BaseModel):
    """The tokens of a reply; a prompt counts once, whatever its continuations are."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def usage_of(groups: Iterable[list[Completion]]) -> dict[str, Any]:
    """Return the usage of several prompts, each with its continuations, as JSON."""
    prompt = output = cached = 0
    for group in groups:
        prompt += group[0].prompt_tokens
        cached += group[0].cached_tokens
        output += sum(len(one.token_ids) for one in group)
    return counted(prompt, output, cached)


def counted(prompt: int, output: int, cached: int) -> dict[str, Any]:
    """Return the usage of so many tokens, as JSON."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


# --------------------------------------------------------------------------------- completion texts


class ChoiceText:
    """The text of a continuation, with its prompt's before it if that is echoed.

    Args:
        tokenizer: None for a model without one, whose tokens are all at place 0.
    """

    def __init__(self, tokenizer: Tokenizer | None, request: Request) -> None:
        self._tokenizer = tokenizer
        self._request = request

    def logprobs(self, done: Completion, names: TokenNames) -> dict[str, Any]:
        """Return the logprobs of a whole continuation, as JSON; under `echo` the prompt's, too."""
        tokens = list(zip(done.token_ids, done.logprobs or (), strict=True))
        offsets = [min(place, len(done.text)) for place in self._of_output(done.token_ids)]
        before, places = self.echoed(done.prompt_logprobs)
        return completion_logprobs([*before, *tokens], [*places, *offsets], names)

    def echoed(
        self, found: Sequence[TokenLogprobs | None] | None
    ) -> tuple[list[tuple[int, TokenLogprobs | None]], list[int]]:
        """Return the prompt's tokens with their logprobs, and their places; none without echo."""
        request = self._request
        if not request.params.echo or found is None:
            return [], []
        tokens = list(zip(request.prompt_ids, found, strict=True))
        return tokens, list(self._places(request.prompt_ids, (), 0))

    @property
    def start(self) -> int:
        """The place where the output begins."""
        request = self._request
        if not request.params.echo or self._tokenizer is None:
            return 0
        text = request.text
        return len(self._tokenizer.decode(request.prompt_ids) if text is None else text)

    def _of_output(self, tokens: Sequence[int]) -> Iterator[int]:
        return self._places(tokens, self._request.prompt_ids, self.start)

    def _places(self, tokens: Sequence[int], before: Sequence[int], place: int) -> Iterator[int]:
        decoder = None
        if self._tokenizer is not None:
            skips = self._request.params.skip_special_tokens
            decoder = self._tokenizer.stream(before, skips)
        for token in tokens:
            yield place
            place += 0 if decoder is None else len(decoder.push(token))


# -------------------------------------------------------------------------------- completion events


@dataclass(frozen=True)
class Wanted:
    """The parts of events that a request asks for.

    Attributes:
        token_ids: ids of tokens.
        prompt_logprobs: logprobs of the prompt's tokens, as vLLM has them.
        usage: the usage in the last event; `running_usage` in every event, too.
    """

    token_ids: bool
    prompt_logprobs: bool
    usage: bool
    running_usage: bool

    @classmethod
    def of(cls, token_ids: bool, prompt_logprobs: bool, options: StreamOptions | None) -> Wanted:
        options = options or StreamOptions()
        usage = bool(options.include_usage)
        return cls(
            token_ids, prompt_logprobs, usage, usage and bool(options.continuous_usage_stats)
        )


class CompletionEvents(Events):
    """Makes events of chunks.

    Args:
        head: the fields that all events have.
        submitted: the requests, one for each prompt.
    """

    def __init__(
        self,
        service: Service,
        head: dict[str, Any],
        submitted: Sequence[Submitted],
        names: TokenNames,
        wanted: Wanted,
    ) -> None:
        self._texts = service.part(TokenTexts)
        self._choices = [ChoiceText(service.client.tokenizer, o.request) for o in submitted]
        self._head = {**head, "choices": [], **({"usage": None} if wanted.usage else {})}
        self._submitted = submitted
        self._names = names
        self._wanted = wanted
        self._places: dict[tuple[int, int], int] = {}
        self._prompt = sum(len(one.request.prompt_ids) for one in submitted)
        self._output = 0
        self._cached = [0] * len(submitted)
        has_more = wanted.token_ids or wanted.prompt_logprobs or wanted.running_usage
        asked = (one.request.params.logprobs for one in submitted)
        self._is_text_alone = not has_more and all(one is None for one in asked)
        self._written: dict[int, tuple[bytes, bytes]] = {}

    def step(self, place: int, chunks: Sequence[Chunk]) -> bytes:
        if len(chunks) == 1:
            return self._event(place, chunks[0])
        return b"".join([self._event(place, chunk) for chunk in chunks])

    def end(self) -> bytes:
        usage = event({**self._head, "usage": self._usage()}) if self._wanted.usage else b""
        return usage + super().end()

    def _event(self, place: int, chunk: Chunk) -> bytes:
        if self._is_text_alone and chunk.completion is None:
            return self._text_event(place, chunk)
        done, key = chunk.completion, (place, chunk.choice)
        is_first = key not in self._places
        if chunk.token_id is not None:
            self._output += 1
        if done is not None:
            check_ended(done)
            self._cached[place] = done.cached_tokens
        choice: dict[str, Any] = {
            "index": place * self._submitted[place].request.params.n + chunk.choice,
            "text": chunk.text,
            "logprobs": self._logprobs(place, chunk, is_first),
            "finish_reason": None if done is None else done.finish_reason,
            "stop_reason": None if done is None else done.stop_reason,
        }
        self._add_wanted(choice, place, chunk, is_first)
        if is_first:
            self._places[key] = 0
        self._places[key] += len(chunk.text)
        says_nothing = not chunk.text and done is None and choice["logprobs"] is None
        if says_nothing and not self._wanted.token_ids:
            return b""
        content = {**self._head, "choices": [choice]}
        if self._wanted.running_usage:
            content["usage"] = self._usage()
        return event(content)

    def _text_event(self, place: int, chunk: Chunk) -> bytes:
        """Return an event that has nothing but text, of which the rest was written once."""
        if chunk.token_id is not None:
            self._output += 1
        if not chunk.text:
            return b""
        index = place * self._submitted[place].request.params.n + chunk.choice
        written = self._written.get(index)
        if written is None:
            choice = {"index": index, "text": "", "logprobs": None}
            choice |= {"finish_reason": None, "stop_reason": None}
            # Within a text of JSON every quotation mark has a backslash before it.
            before, _, after = event({**self._head, "choices": [choice]}).partition(b'"text":""')
            written = self._written[index] = before + b'"text":', after
        return written[0] + json_bytes(chunk.text) + written[1]

    def _logprobs(self, place: int, chunk: Chunk, is_first: bool) -> dict[str, Any] | None:
        if self._submitted[place].request.params.logprobs is None:
            return None
        tokens: list[Any] = []
        places: list[int] = []
        start = self._places.get((place, chunk.choice), 0)
        if is_first:
            choice = self._choices[place]
            tokens, places = choice.echoed(chunk.prompt_logprobs)
            start = choice.start
        if chunk.token_id is not None:
            tokens.append((chunk.token_id, chunk.logprobs))
            places.append(start)
        return completion_logprobs(tokens, places, self._names) if tokens else None

    def _add_wanted(self, choice: dict[str, Any], place: int, chunk: Chunk, is_first: bool) -> None:
        if self._wanted.token_ids:
            choice["token_ids"] = [] if chunk.token_id is None else [chunk.token_id]
            if is_first:
                choice["prompt_token_ids"] = list(self._submitted[place].request.prompt_ids)
        if self._wanted.prompt_logprobs and is_first and chunk.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(chunk.prompt_logprobs, self._texts)

    def _usage(self) -> dict[str, Any]:
        return counted(self._prompt, self._output, sum(self._cached))


# -------------------------------------------------------------------------------------- completions


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

    def fields(self, request: HttpRequest, defaults: SamplingDefaults) -> RequestFields:
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
    request: HttpRequest,
    service: ServiceDependency,
    caller: Annotated[Caller, Depends(requires(Scope.INFER))],
) -> Response:
    """Continue prompts, given as texts or as token ids."""
    call = await Call.of(service, request, caller, body)
    reply_id = new_id("cmpl")
    fields = body.fields(request, service.part(GenerationConfig).defaults)
    submitted = await call.submit(
        body.prompt, fields, reply_id, repeats_ids=bool(body.return_token_ids)
    )
    head = call.head("text_completion", reply_id, body.request_id)
    names = TokenNames(service.part(TokenTexts), bool(body.return_tokens_as_token_ids))
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
        choice["prompt_logprobs"] = prompt_logprobs(done.prompt_logprobs, service.part(TokenTexts))
    if body.return_token_ids:
        choice["token_ids"] = list(done.token_ids)
        choice["prompt_token_ids"] = list(asked.request.prompt_ids)
    return choice
