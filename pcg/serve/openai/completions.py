"""/v1/completions: continuations of prompts.

data: {"id", "object", "created", "model", "choices": [{"index", "text", "logprobs",
"finish_reason", "stop_reason"}], "usage": null}
data: {…, "choices": [], "usage": {…}}                    with stream_options.include_usage
data: [DONE]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from pydantic import BaseModel, Field
from starlette.responses import Response

from pcg.runtime.requests.request import Chunk, Completion, Request, RequestFields
from pcg.runtime.sampling.logprobs import TokenLogprobs
from pcg.runtime.text.tokenizer import Tokenizer
from pcg.serve.http.errors import ApiError
from pcg.serve.http.service import LongBodyRoute, Submitted
from pcg.serve.http.wire import json_bytes, new_id
from pcg.serve.openai.logprobs import CompletionLogprobs
from pcg.serve.openai.replies import STREAMED, Call, CallDependency, ChoiceReply, Usage, event
from pcg.serve.openai.sampling import (
    ResponseFormat,
    SamplingBody,
    SamplingDefaults,
    Whole,
    content_schema,
    of_engine,
)
from pcg.serve.openai.wire import FieldNames, Nothing, Only, Prompts, StreamOptions

router = APIRouter(prefix="/v1", tags=["completions"], route_class=LongBodyRoute)

_DEFAULT_TOKENS = 16
"""OpenAI's default of max_tokens in this endpoint."""


class CompletionBody(SamplingBody):
    """A request for continuations; `user` has no effect."""

    prompt: Prompts
    add_special_tokens: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    echo: bool | None = None
    logprobs: Whole | None = None
    max_tokens: Whole | None = None
    model: str | None = None
    prompt_embeds: Nothing = None
    response_format: ResponseFormat | None = None
    stream_options: StreamOptions | None = None
    suffix: Annotated[Any, Only(("",))] = None
    user: str | None = None

    def names(self) -> FieldNames:
        names = {"max_new_tokens": "max_tokens", "guided_json": "response_format"}
        return FieldNames("prompt", {**names, **self.guide_names()})

    def fields(self, request: HttpRequest, defaults: SamplingDefaults) -> RequestFields:
        """Return the fields of the engine's requests.

        Raises:
            ApiError: fields exclude each other.
        """
        n = self.n or 1
        if self.stream_options is not None and not self.stream:
            message = "stream_options needs stream=true; leave it out"
            raise ApiError(400, message, param="stream_options")
        if self.best_of is not None and self.best_of < n:
            message = f"best_of={self.best_of} is below n={self.n}; raise it"
            raise ApiError(400, message, param="best_of")
        if self.stream and self.best_of is not None and self.best_of > n:
            raise ApiError(
                400,
                "best_of cannot be streamed, as the best are known only at the end; leave out "
                "stream or best_of",
                param="best_of",
            )
        further = {
            "max_new_tokens": _DEFAULT_TOKENS if self.max_tokens is None else self.max_tokens,
            "best_of": self.best_of,
            "echo": self.echo,
            "logprobs": self.logprobs,
            "add_special_tokens": self.add_special_tokens,
        }
        fields = self.request_fields(request, defaults)
        schema = content_schema(self.response_format, self.guide)
        return of_engine(fields, {**further, "guided_json": schema} if schema else further)


class Choice(BaseModel):
    """A continuation, with token ids on request."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None
    prompt_logprobs: list[dict[str, dict[str, Any]] | None] | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionReply(BaseModel):
    """Continuations in the order of the prompts.

    `system_fingerprint` is the version that generated them: NAME@NUMBER for an adapter.
    """

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[Choice]
    usage: Usage


@router.post("/completions", response_model=CompletionReply, responses={200: STREAMED})
async def create_completion(body: CompletionBody, call: CallDependency) -> Response:
    """Continue prompts, which are texts or token ids."""
    call = await call.of(body)
    reply_id = new_id("cmpl")
    fields = body.fields(call.request, call.defaults)
    submitted = await call.submit(
        body.prompt, fields, reply_id, repeats_ids=bool(body.return_token_ids)
    )
    reply = Completions(call, submitted, body, reply_id)
    return await call.answer(submitted, reply, streams=body.stream)


class _Offsets:
    """Positions of tokens in the text of a continuation, which may start with the echoed prompt.

    Args:
        tokenizer: None for a model without a tokenizer; all positions are then 0.
    """

    def __init__(self, tokenizer: Tokenizer | None, request: Request) -> None:
        self._tokenizer = tokenizer
        self._request = request

    @cached_property
    def start(self) -> int:
        request = self._request
        if not request.params.echo or self._tokenizer is None:
            return 0
        text = request.text
        return len(self._tokenizer.decode(request.prompt_ids) if text is None else text)

    def echoed(
        self, values: Sequence[TokenLogprobs | None] | None
    ) -> tuple[list[tuple[int, TokenLogprobs | None]], list[int]]:
        """Return the prompt's tokens with logprobs, and their positions; empty without echo."""
        request = self._request
        if not request.params.echo or values is None:
            return [], []
        tokens = list(zip(request.prompt_ids, values, strict=True))
        return tokens, list(self._places(request.prompt_ids, (), 0))

    def of_output(self, tokens: Sequence[int]) -> Iterator[int]:
        return self._places(tokens, self._request.prompt_ids, self.start)

    def _places(self, tokens: Sequence[int], before: Sequence[int], place: int) -> Iterator[int]:
        decoder = None
        if self._tokenizer is not None:
            skips = self._request.params.skip_special_tokens
            decoder = self._tokenizer.stream(before, skips)
        for token in tokens:
            yield place
            place += 0 if decoder is None else len(decoder.push(token))


class Completions(ChoiceReply):
    """Writes completions."""

    def __init__(
        self, call: Call, submitted: Sequence[Submitted], body: CompletionBody, reply_id: str
    ) -> None:
        kind, options = "text_completion", body.stream_options
        super().__init__(call, submitted, body, options, kind=kind, reply_id=reply_id)
        if self.has_usage:
            self.head["usage"] = None
        tokenizer = call.service.client.tokenizer
        self._offsets = [_Offsets(tokenizer, each.request) for each in submitted]
        self._places: dict[tuple[int, int], int] = {}
        has_more = self.has_token_ids or self.has_prompt_logprobs or self.has_running_usage
        has_logprobs = any(each.request.params.logprobs is not None for each in submitted)
        self._is_text_alone = not has_more and not has_logprobs
        self._written: dict[int, tuple[bytes, bytes]] = {}

    def whole(self, groups: Sequence[Sequence[Completion]]) -> dict[str, Any]:
        pairs = [(index, each) for index, group in enumerate(groups) for each in group]
        choices = [self._choice(number, *pair) for number, pair in enumerate(pairs)]
        return {**self.head, "choices": choices, "usage": self.usage(groups)}

    def _choice(self, number: int, index: int, completion: Completion) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": number,
            "text": completion.text,
            "logprobs": None,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if completion.logprobs is not None:
            offsets, length = self._offsets[index], len(completion.text)
            tokens, places = offsets.echoed(completion.prompt_logprobs)
            tokens += zip(completion.token_ids, completion.logprobs, strict=True)
            places += [min(place, length) for place in offsets.of_output(completion.token_ids)]
            choice["logprobs"] = self.logprobs.completion(tokens, places)
        if self.has_prompt_logprobs and completion.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self.logprobs.prompt(completion.prompt_logprobs)
        if self.has_token_ids:
            choice["token_ids"] = list(completion.token_ids)
            choice["prompt_token_ids"] = list(self.submitted[index].request.prompt_ids)
        return choice

    def events(self, index: int, chunk: Chunk) -> bytes:
        completion, key = chunk.completion, (index, chunk.choice)
        request = self.submitted[index].request
        number = index * request.params.n + chunk.choice
        if self._is_text_alone and completion is None:
            return self._text_event(number, chunk.text)
        is_first, logprobs = key not in self._places, None
        if request.params.logprobs is not None:
            logprobs = self._chunk_logprobs(index, chunk, is_first)
        choice: dict[str, Any] = {
            "index": number,
            "text": chunk.text,
            "logprobs": logprobs,
            "finish_reason": None if completion is None else completion.finish_reason,
            "stop_reason": None if completion is None else completion.stop_reason,
        }
        if self.has_token_ids:
            choice["token_ids"] = [] if chunk.token_id is None else [chunk.token_id]
            if is_first:
                choice["prompt_token_ids"] = list(request.prompt_ids)
        if self.has_prompt_logprobs and is_first and chunk.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self.logprobs.prompt(chunk.prompt_logprobs)
        self._places[key] = self._places.get(key, 0) + len(chunk.text)
        is_empty = not chunk.text and completion is None and logprobs is None
        if is_empty and not self.has_token_ids:
            return b""
        content = {**self.head, "choices": [choice]}
        if self.has_running_usage:
            content["usage"] = self.usage()
        return event(content)

    def _text_event(self, number: int, text: str) -> bytes:
        """Return an event that has only text; its constant parts are cached."""
        if not text:
            return b""
        written = self._written.get(number)
        if written is None:
            choice = {"index": number, "text": "", "logprobs": None}
            choice |= {"finish_reason": None, "stop_reason": None}
            # The pattern is unique: JSON escapes quotation marks within texts.
            before, _, after = event({**self.head, "choices": [choice]}).partition(b'"text":""')
            written = self._written[number] = before + b'"text":', after
        return written[0] + json_bytes(text) + written[1]

    def _chunk_logprobs(self, index: int, chunk: Chunk, is_first: bool) -> dict[str, Any] | None:
        tokens: list[tuple[int, TokenLogprobs | None]] = []
        places: list[int] = []
        start = self._places.get((index, chunk.choice), 0)
        if is_first:
            tokens, places = self._offsets[index].echoed(chunk.prompt_logprobs)
            start = self._offsets[index].start
        if chunk.token_id is not None:
            tokens.append((chunk.token_id, chunk.logprobs))
            places.append(start)
        return self.logprobs.completion(tokens, places) if tokens else None
