"""The service: the engine, its keys and options, and the parts of a server that routes use.

A route declares the service as `ServiceDependency`, and every other part by its class:

    catalog: Annotated[Catalog, part(Catalog)]

Long bodies are parsed and validated on a thread. Parsing holds the interpreter lock for at most 10
ms, as the elements of a body are limited (`limits`); validation releases it between two values. On
the event loop both would block for 100 ms.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ParamSpec, Protocol, TypeAlias, TypeVar
from weakref import WeakValueDictionary

import orjson
from fastapi import Depends, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.types import Receive, Scope

from pcg.errors import GenerationError, PcgError, ServeError
from pcg.keys import Keys
from pcg.keys import Scope as KeyScope
from pcg.runtime.adapters.cache import ServedAdapter
from pcg.runtime.engine.commands import MostTokens, Taken
from pcg.runtime.requests.request import Request as EngineRequest
from pcg.runtime.requests.request import RequestFields
from pcg.runtime.requests.stream import Stream
from pcg.serve.engine.client import EngineClient
from pcg.serve.engine.options import ServeOptions
from pcg.serve.http.caller import Caller
from pcg.serve.http.errors import ApiError, of_validation
from pcg.serve.http.limits import LONG_BYTES
from pcg.serve.http.middleware import note_requests

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Part = TypeVar("Part")
Prompt: TypeAlias = str | Sequence[int]
Handler: TypeAlias = Callable[[Request], Awaitable[Response]]

MOST_PROMPT_LOGPROBS = 2**21
"""The most log-probabilities of prompt tokens in a reply; writing them takes half a GiB."""
MOST_REPEATED = 2**24
"""The most characters and token ids of prompts that a reply's continuations repeat."""
_THREADS = 4
"""Threads that tokenize, render templates and read files; more would wait for the lock."""


class Model(Protocol):
    """A model for requests; see `pcg.serve.adapters.catalog.ServedModel`."""

    @property
    def name(self) -> str:
        """Name of the model in replies."""

    @property
    def adapter(self) -> ServedAdapter | None:
        """The adapter; None for the base."""


@dataclass(frozen=True)
class Submitted:
    """A request in the engine, and its output."""

    request: EngineRequest
    stream: Stream


class Service:
    """The engine of a server, its keys and options, and the parts of the server.

    Attributes:
        created_s: start time, Unix seconds.
        max_model_len: the most tokens of a prompt and its output; None without a limit.
        memory: maximum memory of the engine.
        begins, stops, ends: callbacks for the start of serving, the start of draining, and the end
            of the last request.
    """

    def __init__(self, client: EngineClient, keys: Keys, options: ServeOptions) -> None:
        self.client = client
        self.keys = keys
        self.options = options
        self.created_s = int(time.time())
        asked, positions = options.max_model_len, client.facts.max_positions
        if asked is not None and positions is not None and asked > positions:
            raise ServeError(
                f"max_model_len={asked}, and the model has {positions} positions; use at most "
                f"{positions}"
            )
        self.max_model_len = positions if asked is None else asked
        sizes = [adapter.size_bytes for adapter in client.adapters.values()]
        self.memory = replace(client.facts.memory, adapters=sum(sizes))
        self.begins: list[Callable[[], None]] = []
        self.stops: list[Callable[[], None]] = []
        self.ends: list[Callable[[], None]] = []
        self._parts: dict[type, Any] = {}
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._threads = ThreadPoolExecutor(_THREADS, "pcg serve")

    def add(self, part: Part) -> Part:
        """Add a part, or replace the part of its class; return the part."""
        self._parts[type(part)] = part
        return part

    def part(self, kind: type[Part]) -> Part:
        """Return the part of a class. ApiError: the part needs a data folder."""
        value: Part | None = self._parts.get(kind)
        if value is None:
            # Tinker's client sends its first request on a connection that it never closes.
            raise ApiError(
                400,
                "This server stores nothing: it was started without --data-dir.",
                code="unsupported",
                headers={"connection": "close"},
            )
        return value

    def has(self, kind: type) -> bool:
        return kind in self._parts

    def close(self) -> None:
        """Stop the threads after the last request."""
        self._threads.shutdown(cancel_futures=True)
        for end in self.ends:
            end()

    def may_read_metrics(self, caller: Caller | None) -> bool:
        """Return True if a caller may read /metrics; the caller is None without a key."""
        if self.options.metrics_without_key:
            return True
        return caller is not None and not caller.scopes.isdisjoint(
            (KeyScope.METRICS, KeyScope.ADMIN)
        )

    def shows_engine(self, caller: Caller) -> bool:
        """Return True if a caller may see numbers of the whole engine, including other tenants'."""
        return self.keys.tenants == 1 or self.may_read_metrics(caller)

    async def beside(
        self,
        caller: Caller,
        act: Callable[Arguments, Result],
        *args: Arguments.args,
        **keywords: Arguments.kwargs,
    ) -> Result:
        """Run a function on a thread, such as tokenizing or rendering a template.

        A tenant uses at most half of the threads, so other tenants' requests do not wait for it.
        """
        turn = self._turns.get(caller.tenant)
        if turn is None:
            turn = self._turns[caller.tenant] = asyncio.Semaphore(_THREADS // 2)
        async with turn:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, partial(act, *args, **keywords))

    # ------------------------------------------------------------------------------- requests

    async def room(self, model: Model) -> int:
        """Return the maximum number of tokens of a prompt and its output together."""
        virtual = 0 if model.adapter is None else model.adapter.prompt_tokens
        adapter = None if model.adapter is None else self.client.version_of(model.adapter).key
        pages = await asyncio.wrap_future(self.client.call(MostTokens(adapter)))
        bounds = (pages, self.max_model_len)
        return max(1, min(bound for bound in bounds if bound is not None) - virtual)

    async def submit(
        self,
        caller: Caller,
        model: Model,
        prompts: Sequence[Prompt],
        fields: RequestFields,
        request_id: str,
        *,
        repeats_ids: bool = False,
    ) -> list[Submitted]:
        """Submit all prompts of a request, or none.

        Args:
            prompts: texts, or lists of token ids.
            fields: the fields of each request. With a seed, prompt i starts at seed + i n, as in
                `Executor.generate`; `truncate_prompt_tokens` of -1 keeps as many tokens as fit with
                the output.
            request_id: a text from `new_id`.
            repeats_ids: True if each continuation in the reply repeats its prompt's token ids.
        Raises:
            GenerationError: a prompt or a field is invalid.
            ApiError: a prompt or the reply is too long.
            QueueFullError: too many requests wait.
            EngineError: the engine takes no requests.
        """
        if fields.get("truncate_prompt_tokens") == -1:
            new = 0 if self.client.facts.labels else fields.get("max_new_tokens", 0)
            most = max(1, await self.room(model) - (new if isinstance(new, int) else 0))
            fields = {**fields, "truncate_prompt_tokens": most}
        make = partial(self._requests, caller, model, prompts, fields, request_id)
        requests = await self.beside(caller, make)
        _check_repeated(requests, repeats_ids)
        streams = [self.client.submit(request) for request in requests]
        if len(streams) > 1:
            await self._all_begun(streams)
        pairs = list(zip(requests, streams, strict=True))
        note_requests(model.name, pairs)
        return [Submitted(request, stream) for request, stream in pairs]

    async def _all_begun(self, streams: Sequence[Stream]) -> None:
        """Wait until the engine has taken all requests. If it refuses any, cancel all and raise."""
        await asyncio.wrap_future(self.client.call(Taken()))
        try:
            for stream in streams:
                if stream.is_over:
                    await stream.completions()
        except PcgError:
            for stream in streams:
                stream.cancel()
            raise

    def _requests(
        self,
        caller: Caller,
        model: Model,
        prompts: Sequence[Prompt],
        fields: RequestFields,
        request_id: str,
    ) -> list[EngineRequest]:
        requests: list[EngineRequest] = []
        count = len(prompts) * (fields.get("best_of") or fields.get("n", 1))
        most = self.options.queue_of(self.keys.tenants)
        if count > most:
            raise ApiError(
                400,
                f"{count} sequences in one request; this server takes at most {most} of a tenant: "
                "send fewer prompts or a smaller n at a time",
                param="prompt",
            )
        for index, prompt in enumerate(prompts):
            if not prompt:
                raise GenerationError(f"prompt {index} is empty; give at least one token")
            whole: RequestFields = {
                "logprobs_mode": self.options.logprobs_mode,
                **fields,
                "tenant": caller.tenant,
                "request_id": f"{request_id}-{index}",
            }
            if isinstance(prompt, str):
                check_length(prompt, self.max_model_len)
            seed = fields.get("seed")
            if index and isinstance(seed, int):
                whole["seed"] = (seed + index * requests[0].params.width) % 2**63
            request = self.client.request(prompt, model.adapter, whole)
            self._check(request)
            requests.append(request)
        _check_prompt_logprobs(requests)
        return requests

    def _check(self, request: EngineRequest) -> None:
        """Refuse a request that exceeds the server's options; the message names the option."""
        of_labels = bool(self.client.facts.labels)  # all of them are asked for; see `_limit`
        most_logprobs = sys.maxsize if of_labels else self.options.max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(request.params, name)
            if count is not None and count > most_logprobs:
                words = f"{name}={count}, and this server gives at most {most_logprobs}"
                raise ApiError(400, words, param=name)
        most, new = self.max_model_len, 0 if of_labels else request.params.max_new_tokens
        if most is not None and request.length + new > most:
            raise ApiError(
                400,
                f"This model's maximum context length is {most} tokens. However, you requested "
                f"{request.length + new} tokens ({request.length} in the prompt, {new} in the "
                "output). Please reduce the length of one of them.",
                param="max_new_tokens" if request.length < most else "prompt",
                code="context_length_exceeded",
            )


def _check_prompt_logprobs(requests: Sequence[EngineRequest]) -> None:
    """Refuse an excessively large reply: each output repeats the prompt's log-probabilities."""
    count = sum(
        request.params.n * len(request.prompt_ids) * (request.params.of_prompt + 1)
        for request in requests
        if request.params.of_prompt is not None
    )
    if count > MOST_PROMPT_LOGPROBS:
        raise ApiError(
            400,
            f"{count} log-probabilities of prompts' tokens in one reply, and this server gives at "
            f"most {MOST_PROMPT_LOGPROBS}: send fewer prompts at a time, a smaller n or fewer "
            "top tokens",
            param="prompt_logprobs",
        )


def _check_repeated(requests: Sequence[EngineRequest], repeats_ids: bool) -> None:
    size = sum(
        r.params.n * (r.params.echo * len(r.text or r.prompt_ids) + repeats_ids * len(r.prompt_ids))
        for r in requests
    )
    if size > MOST_REPEATED:
        raise ApiError(
            400,
            f"the reply would repeat {size} characters and token ids of prompts, and this server "
            f"repeats at most {MOST_REPEATED}: send fewer prompts at a time or a smaller n, or "
            "leave out echo and return_token_ids",
            param="n",
        )


async def _service(request: Request) -> Service:  # FastAPI runs sync dependencies on threads
    service: Service = request.app.state.service
    return service


ServiceDependency = Annotated[Service, Depends(_service)]
"""The service, as a parameter of a route."""


def part(kind: type[Any]) -> Any:
    """Return a route's dependency on a part of the server, for `Annotated[Kind, …]`."""

    async def find(request: Request) -> Any:  # FastAPI runs sync dependencies on threads
        return request.app.state.service.part(kind)

    return Depends(find)


# -------------------------------------------------------------------------------------- long bodies


class LongBodyRoute(APIRoute):
    """A route that parses and validates long bodies on a thread."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle, field = super().get_route_handler(), self.body_field

        async def handle_request(request: Request) -> Response:
            return await self.answer(handle, _Request(field, request.scope, request.receive))

        return handle_request

    async def answer(self, handle: Handler, request: Request) -> Response:
        """Answer a request with FastAPI's handler of the route."""
        return await handle(request)


class _Request(Request):
    """A request that parses and validates a long body on a thread.

    Args:
        field: FastAPI's validator of the body; None for a route without a body.
    """

    def __init__(self, field: Any, scope: Scope, receive: Receive) -> None:
        super().__init__(scope, receive)
        self._field = field

    async def json(self) -> Any:
        body = await self.body()
        if len(body) < LONG_BYTES or self._field is None:
            return await super().json()
        service: Service = self.app.state.service
        caller: Caller = self.state.caller
        return await service.beside(caller, validated, self._field, body)


def validated(field: Any, body: bytes) -> Any:
    """Parse and validate a body.

    Args:
        field: FastAPI's validator.
    Raises:
        ApiError: the body does not match the schema.
        ValueError: the body is not JSON.
    """
    try:
        content = orjson.loads(body)  # twice as fast as json
    except orjson.JSONDecodeError:  # orjson also refuses NaN and unpaired surrogates
        content = json.loads(body)
    value, errors = field.validate(content, {}, loc=("body",))
    if errors:
        raise of_validation(RequestValidationError(errors, body=content))
    return value


# --------------------------------------------------------------------------------- lengths of texts


TOKEN_CHARACTERS = 16
"""Characters per token in the limit of a text; ordinary texts have four."""
SHORT = 2**20
"""Texts of up to this many characters are always accepted."""
FEW = 2**16
"""Up to this many tokens are always detokenized."""


def check_length(text: str, max_model_len: int | None) -> None:
    """Refuse a text that is far longer than any prompt, before it is tokenized.

    Args:
        max_model_len: the most tokens of a prompt and its output; None without a limit.
    Raises:
        ApiError: the text is too long.
    """
    if max_model_len is None:
        return
    most = max(SHORT, TOKEN_CHARACTERS * max_model_len)
    if len(text) > most:
        raise ApiError(
            400,
            f"A text has {len(text)} characters, and this server takes at most {most}: the model's "
            f"context has {max_model_len} tokens. Send less.",
            param="prompt",
            code="context_length_exceeded",
        )


def check_count(count: int, max_model_len: int | None) -> None:
    """Refuse far more tokens than the model's context, before they are detokenized.

    Args:
        count: the number of tokens.
        max_model_len: the most tokens of a prompt and its output; None without a limit.
    Raises:
        ApiError: the tokens are too many.
    """
    if max_model_len is None:
        return
    most = max(FEW, max_model_len)
    if count > most:
        raise ApiError(
            400,
            f"{count} tokens, and this server takes at most {most}: the model's context has "
            f"{max_model_len} tokens. Send fewer.",
            param="tokens",
            code="context_length_exceeded",
        )
