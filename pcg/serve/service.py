"""The service: what the routes of a server share, and the one way of requests to the engine."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, ParamSpec, TypeAlias, TypeVar
from weakref import WeakValueDictionary

from fastapi import Depends, Request

from pcg.errors import GenerationError, PcgError
from pcg.keys import Keys, Scope
from pcg.runtime.requests.request import Request as EngineRequest
from pcg.runtime.requests.request import RequestFields
from pcg.runtime.requests.stream import Stream
from pcg.serve.adapters.catalog import Catalog, ServedModel
from pcg.serve.engine.client import EngineClient
from pcg.serve.errors import ApiError
from pcg.serve.files.files import Files
from pcg.serve.files.quota import Quota
from pcg.serve.generation_config import GenerationConfig
from pcg.serve.graders.python_graders import PythonGraders
from pcg.serve.jobs.grading import Grading
from pcg.serve.jobs.runner import JobRunner
from pcg.serve.metrics.engine_metrics import EngineMetrics, Served
from pcg.serve.observers import open_observers
from pcg.serve.openai.chat.tool_use import ChatSupport
from pcg.serve.openai.logprobs import TokenTexts
from pcg.serve.openai.responses.store import ResponseStore
from pcg.serve.openai.text_bound import check_length
from pcg.serve.options import ServeOptions
from pcg.serve.record import note_requests
from pcg.serve.security.caller import Caller
from pcg.serve.store.store import Store
from pcg.serve.tinker.rest.links import LINKS, Links
from pcg.serve.tinker.sampling.samplers import Samplers
from pcg.serve.tinker.tinker import Tinker


@dataclass(frozen=True)
class Submitted:
    """A request that the engine has, and its output."""

    request: EngineRequest
    stream: Stream


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Prompt: TypeAlias = str | Sequence[int]

MOST_PROMPT_LOGPROBS = 2**21
"""The most log-probabilities of prompts' tokens in one reply, which take half a GiB to write."""
MOST_REPEATED = 2**24
"""The most characters and token ids of prompts that the continuations of one reply repeat."""
_THREADS = 4
"""Threads that tokenize, render templates and read files: more would only wait for each other."""


class Service:
    """A server's engine with its catalog, keys and options.

    Attributes:
        created_s: when it was made, Unix seconds.
        max_model_len: the most tokens of a prompt and its output; None if the model has no bound.
        generation: the defaults of sampling.
        memory: the memory that it takes at most.
        metrics: the page of metrics.
        observers: what is told of every request over HTTP.
        links: the addresses of files that need no key.
        python_graders: what runs tenants' graders in sandboxes.
        grading: what grades completions of jobs; an application gives it to its service.
    """

    def __init__(
        self,
        client: EngineClient,
        keys: Keys,
        options: ServeOptions,
        generation: GenerationConfig | None = None,
        store: Store | None = None,
    ) -> None:
        self.client = client
        self.python_graders = PythonGraders(options.python_graders)
        self._files = None if store is None else Files(store, Quota(options))
        self._jobs: JobRunner | None = None
        self.grading: Grading | None = None
        self.catalog = Catalog(client, options, store)
        self._tinker = (
            None if store is None else Tinker(client, self.catalog.loader, store, options)
        )
        self.links = Links(LINKS)
        self._samplers = None if self._tinker is None else Samplers(self, self._tinker)
        facts, tokenizer = client.facts, client.tokenizer
        self.keys = keys
        self.options = options
        self.generation = generation or GenerationConfig()
        self.created_s = int(time.time())
        bounds = [n for n in (options.max_model_len, facts.max_positions) if n is not None]
        self.max_model_len = min(bounds, default=None)
        self.token_texts = TokenTexts(tokenizer)
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        sizes = [adapter.size_bytes for adapter in client.adapters.values()]
        self.memory = replace(facts.memory, adapters=sum(sizes))
        served = Served(
            self.catalog.names[0],
            self.max_model_len,
            options.max_num_seqs,
            self.memory.bytes,
            self.catalog.owned,
        )
        self.metrics = EngineMetrics(client, served)
        self.chat = ChatSupport(
            tokenizer,
            chat_template=options.chat_template,
            tool_call_parser=options.tool_call_parser,
            trusts_templates=options.trust_request_chat_template,
        )
        self.observers = open_observers(options)
        self.responses = ResponseStore()
        self._threads = ThreadPoolExecutor(_THREADS, "pcg serve")

    def begin(self) -> None:
        """Go on with what is kept, once the event loop runs."""
        if self._files is not None:
            self.jobs.begin()
        if self._tinker is not None:
            self._tinker.begin()
            self.samplers.begin()

    def stop_waiting(self) -> None:
        """Have no client wait for a result any more, as the server drains."""
        if self._tinker is not None:
            self._tinker.futures.close()

    def close(self) -> None:
        """End the threads, once no request is left."""
        self._threads.shutdown(cancel_futures=True)
        self.python_graders.close()
        for observer in self.observers:
            observer.close()

    @property
    def files(self) -> Files:
        """The files that are kept. ApiError: the server keeps nothing."""
        if self._files is None:
            raise _keeps_nothing()
        return self._files

    @property
    def reads_and_deletes(self) -> bool:
        """True while nothing new is kept, as the disk has no room."""
        return self._files is not None and not self._files.store.reserve.is_whole

    @property
    def tinker(self) -> Tinker:
        """The state of Tinker's protocol. ApiError: the server keeps nothing."""
        if self._tinker is None:
            raise _keeps_nothing()
        return self._tinker

    @property
    def samplers(self) -> Samplers:
        """The sampling sessions of Tinker's protocol. ApiError: the server keeps nothing."""
        if self._samplers is None:
            raise _keeps_nothing()
        return self._samplers

    @property
    def jobs(self) -> JobRunner:
        """The finetuning jobs. ApiError: the server keeps nothing."""
        if self._jobs is None:
            assert self.grading is not None  # the application has it
            self._jobs = JobRunner(
                self.client, self.files, self.catalog, self.options, self.grading
            )
        return self._jobs

    def may_read_metrics(self, caller: Caller | None) -> bool:
        """Return True if a caller may read /metrics; None is one without a key."""
        if self.options.metrics_without_key:
            return True
        return caller is not None and not caller.scopes.isdisjoint((Scope.METRICS, Scope.ADMIN))

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

    async def room(self, model: ServedModel) -> int:
        """Return the most tokens that a prompt and its output may have together."""
        virtual = 0 if model.adapter is None else model.adapter.prompt_tokens
        pages = await asyncio.wrap_future(self.client.most_tokens(model.adapter))
        bounds = (pages, self.max_model_len)
        return max(1, min(bound for bound in bounds if bound is not None) - virtual)

    async def submit(
        self,
        caller: Caller,
        model: ServedModel,
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
            kept = max(1, await self.room(model) - (new if isinstance(new, int) else 0))
            fields = {**fields, "truncate_prompt_tokens": kept}
        make = partial(self._requests, caller, model, prompts, fields, request_id)
        requests = await self.beside(caller, make)
        _check_repeated(requests, repeats_ids)
        made = [Submitted(request, self.client.submit(request)) for request in requests]
        if len(made) > 1:
            await self._all_begun(made)
        note_requests(model.name, [(one.request, one.stream) for one in made])
        return made

    async def _all_begun(self, made: Sequence[Submitted]) -> None:
        """Wait until the engine has all requests; raises why it refuses one, and ends all."""
        await asyncio.wrap_future(self.client.taken())
        try:
            for one in made:
                if one.stream.is_over:
                    await one.stream.completions()
        except PcgError:
            for one in made:
                one.stream.cancel()
            raise

    def _requests(
        self,
        caller: Caller,
        model: ServedModel,
        prompts: Sequence[Prompt],
        fields: RequestFields,
        request_id: str,
    ) -> list[EngineRequest]:
        made: list[EngineRequest] = []
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
            own: RequestFields = {
                "logprobs_mode": self.options.logprobs_mode,
                **fields,
                "tenant": caller.tenant,
                "request_id": f"{request_id}-{index}",
            }
            if isinstance(prompt, str):
                check_length(prompt, self.max_model_len)
            seed = fields.get("seed")
            if index and isinstance(seed, int):
                own["seed"] = (seed + index * made[0].params.width) % 2**63
            request = self.client.request(prompt, model.adapter, own)
            self._check(request)
            made.append(request)
        _check_prompt_logprobs(made)
        return made

    def _check(self, request: EngineRequest) -> None:
        """Refuse a request that is more than the server's options allow, by their names."""
        given = self.options.max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(request.params, name)
            if asked is not None and asked > given:
                raise ApiError(
                    400, f"{name}={asked}, and this server gives at most {given}", param=name
                )
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
    """Refuse requests whose reply would be out of all proportion: it has the prompt's with each."""
    asked = ((one.params, len(one.prompt_ids)) for one in requests)
    count = sum(
        params.n * length * (params.of_prompt + 1)
        for params, length in asked
        if params.of_prompt is not None
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
    """Refuse requests whose reply would be long because it has the prompts again and again."""
    size = sum(
        one.params.n
        * (one.params.echo * len(one.text or one.prompt_ids) + repeats_ids * len(one.prompt_ids))
        for one in requests
    )
    if size > MOST_REPEATED:
        raise ApiError(
            400,
            f"the reply would repeat {size} characters and token ids of prompts, and this server "
            f"repeats at most {MOST_REPEATED}: send fewer prompts at a time or a smaller n, or "
            "leave out echo and return_token_ids",
            param="n",
        )


def _keeps_nothing() -> ApiError:
    said = "This server keeps nothing: it was started without --data-dir."
    # A client of Tinker's asks first on a connection that it never closes.
    return ApiError(400, said, code="unsupported", headers={"connection": "close"})


def new_id(prefix: str) -> str:
    """Return a new id of a reply, as cmpl-3f…."""
    return f"{prefix}-{secrets.token_hex(16)}"


async def _service(request: Request) -> Service:  # FastAPI would run it on a thread
    service: Service = request.app.state.service
    return service


ServiceDependency = Annotated[Service, Depends(_service)]
"""The service, as a parameter of a route."""
