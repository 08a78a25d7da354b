"""The service: the engine, its keys and options, and the parts of a server that routes ask for.

A route takes the service as `ServiceDependency`, and every other part by its class:

    catalog: Annotated[Catalog, part(Catalog)]

Long bodies are read as JSON and validated on a thread, so that others go on meanwhile. Reading
holds Python's lock, for 10 ms at most as the elements of a body are bounded (`limits`), and
validation gives it up between two values; together they would hold up the event loop for 100 ms.
"""

from __future__ import annotations

import asyncio
import json
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

from pcg.errors import GenerationError, PcgError
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
"""The most log-probabilities of prompts' tokens in one reply, which take half a GiB to write."""
MOST_REPEATED = 2**24
"""The most characters and token ids of prompts that the continuations of one reply repeat."""
_THREADS = 4
"""Threads that tokenize, render templates and read files: more would only wait for each other."""


class Model(Protocol):
    """A model that answers requests; see `pcg.serve.adapters.catalog.ServedModel`."""

    @property
    def name(self) -> str:
        """Its name in replies."""

    @property
    def adapter(self) -> ServedAdapter | None:
        """The adapter that answers; None for the base."""


@dataclass(frozen=True)
class Submitted:
    """A request that the engine has, and its output."""

    request: EngineRequest
    stream: Stream


class Service:
    """The engine of a server, its keys and options, and the parts of the server.

    Attributes:
        created_s: start time, Unix seconds.
        max_model_len: the most tokens of a prompt and its output; None if the model has no bound.
        memory: the memory that the engine takes at most.
        begins, stops, ends: are called in order when requests are taken, when the server drains,
            and when no request is left.
    """

    def __init__(self, client: EngineClient, keys: Keys, options: ServeOptions) -> None:
        self.client = client
        self.keys = keys
        self.options = options
        self.created_s = int(time.time())
        bounds = [n for n in (options.max_model_len, client.facts.max_positions) if n is not None]
        self.max_model_len = min(bounds, default=None)
        sizes = [adapter.size_bytes for adapter in client.adapters.values()]
        self.memory = replace(client.facts.memory, adapters=sum(sizes))
        self.begins: list[Callable[[], None]] = []
        self.stops: list[Callable[[], None]] = []
        self.ends: list[Callable[[], None]] = []
        self._parts: dict[type, Any] = {}
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._threads = ThreadPoolExecutor(_THREADS, "pcg serve")

    def add(self, part: Part) -> Part:
        """Add a part, or replace the part of its class; returns it."""
        self._parts[type(part)] = part
        return part

    def part(self, kind: type[Part]) -> Part:
        """Return the part of a class. ApiError: the server stores nothing, and has no such part."""
        value: Part | None = self._parts.get(kind)
        if value is None:
            # A client of Tinker's asks first on a connection that it never closes.
            raise ApiError(
                400,
                "This server keeps nothing: it was started without --data-dir.",
                code="unsupported",
                headers={"connection": "close"},
            )
        return value

    def has(self, kind: type) -> bool:
        return kind in self._parts

    def close(self) -> None:
        """End the threads, once no request is left."""
        self._threads.shutdown(cancel_futures=True)
        for end in self.ends:
            end()

    def may_read_metrics(self, caller: Caller | None) -> bool:
        """Return True if a caller may read /metrics; None is one without a key."""
        if self.options.metrics_without_key:
            return True
        return caller is not None and not caller.scopes.isdisjoint(
            (KeyScope.METRICS, KeyScope.ADMIN)
        )

    def shows_engine(self, caller: Caller) -> bool:
        """Return True if a caller may know numbers of the whole engine, which tell of others."""
        return self.keys.tenants == 1 or self.may_read_metrics(caller)

    async def beside(
        self,
        caller: Caller,
        act: Callable[Arguments, Result],
        *args: Arguments.args,
        **keywords: Arguments.kwargs,
    ) -> Result:
        """Run a function on a thread beside the event loop, as tokenizing and templates.

        A tenant has half of the threads at most, so that others' requests need not wait for it.
        """
        turn = self._turns.get(caller.tenant)
        if turn is None:
            turn = self._turns[caller.tenant] = asyncio.Semaphore(_THREADS // 2)
        async with turn:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, partial(act, *args, **keywords))

    # ------------------------------------------------------------------------------- requests

    async def room(self, model: Model) -> int:
        """Return the most tokens that a prompt and its output may have together."""
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
        """Submit prompts of one caller, all of them or none.

        Args:
            prompts: texts, or lists of token ids.
            fields: the fields of each; with a seed, prompt i begins at seed + i n, as in
                `Executor.generate`, and `truncate_prompt_tokens` of -1 keeps what there is room
                for beside the output.
            request_id: a text that `new_id` made.
            repeats_ids: True if each continuation of the reply has its prompt's token ids.
        Raises:
            GenerationError: a prompt or a field cannot be.
            ApiError: a prompt is too long, or the reply would be.
            QueueFullError: too much waits already.
            EngineError: the engine takes no requests.
        """
        if fields.get("truncate_prompt_tokens") == -1:
            new = fields.get("max_new_tokens", 0)
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
        """Wait until the engine has all requests; if it refuses one, end all and raise why."""
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
        """Refuse a request that is more than the server's options allow, by their names."""
        most_logprobs = self.options.max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(request.params, name)
            if count is not None and count > most_logprobs:
                words = f"{name}={count}, and this server gives at most {most_logprobs}"
                raise ApiError(400, words, param=name)
        most, new = self.max_model_len, request.params.max_new_tokens
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
    """Refuse requests with a reply out of all proportion: each output has the prompt's with it."""
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
            "likeliest tokens",
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


async def _service(request: Request) -> Service:  # FastAPI would run it on a thread
    service: Service = request.app.state.service
    return service


ServiceDependency = Annotated[Service, Depends(_service)]
"""The service, as a parameter of a route."""


def part(kind: type[Any]) -> Any:
    """Return the dependency of a route on a part of the server, for `Annotated[Kind, …]`."""

    async def find(request: Request) -> Any:  # FastAPI would run it on a thread
        return request.app.state.service.part(kind)

    return Depends(find)


# -------------------------------------------------------------------------------------- long bodies


class LongBodyRoute(APIRoute):
    """A route whose long bodies come to it as objects of its model already."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle, field = super().get_route_handler(), self.body_field

        async def handle_request(request: Request) -> Response:
            return await self.answer(handle, _Request(field, request.scope, request.receive))

        return handle_request

    async def answer(self, handle: Handler, request: Request) -> Response:
        """Answer a request, by what FastAPI has made of the route."""
        return await handle(request)


class _Request(Request):
    """A request that validates a long body when it is read.

    Args:
        field: FastAPI's validator of the body; None for a route without one.
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
    """Return the object that a body is.

    Args:
        field: FastAPI's validator.
    Raises:
        ApiError: it is not as the schema says.
        ValueError: it is no JSON.
    """
    try:
        content = orjson.loads(body)  # in half the time
    except orjson.JSONDecodeError:  # which also refuses NaN and half characters
        content = json.loads(body)
    value, errors = field.validate(content, {}, loc=("body",))
    if errors:
        raise of_validation(RequestValidationError(errors, body=content))
    return value


# --------------------------------------------------------------------------------- lengths of texts


TOKEN_CHARACTERS = 16
"""More than ordinary texts have for each of their tokens, which is four."""
SHORT = 2**20
"""Characters of a text that is always taken."""
FEW = 2**16
"""Tokens that are always made text of."""


def check_length(text: str, max_model_len: int | None) -> None:
    """Refuse a text that is far longer than a prompt can be, before it is tokenized.

    Args:
        max_model_len: the most tokens of a prompt and its output; None if there is no bound.
    Raises:
        ApiError: it is too long.
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
    """Refuse tokens that are far more than a model's context, before text is made of them.

    Args:
        count: the number of tokens.
        max_model_len: the most tokens of a prompt and its output; None if there is no bound.
    Raises:
        ApiError: they are too many.
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
