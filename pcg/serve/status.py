"""GET /status and GET /: the state of the server that a key may see, and its page.

The state contains nothing of other tenants: adapters, running requests and jobs are those of the
caller's tenant and of the operator, or all for a key with the scope `admin`. Numbers of the whole
engine reveal other tenants' use; they need the scope `admin` or `metrics`, or a server with a
single tenant.

The page itself contains nothing of the server: without a key it shows a form, and it loads its
content from routes that need a key. Its policy allows only the page's own script.
"""

from __future__ import annotations

import asyncio
import time
from functools import cache

from fastapi import APIRouter
from fastapi.responses import HTMLResponse
from pydantic import BaseModel

from pcg.keys import Scope
from pcg.pages.environment import page_environment
from pcg.runtime.engine.commands import Status
from pcg.runtime.metrics.status import EngineNumbers, EngineStatus, JobState, JobStatus
from pcg.runtime.metrics.totals import Histogram, Promised
from pcg.serve.adapters.catalog import Catalog
from pcg.serve.engine.engine_names import Owned
from pcg.serve.http.caller import Caller, Infer
from pcg.serve.http.service import Service, ServiceDependency
from pcg.serve.http.wire import page_headers
from pcg.version import __version__

router = APIRouter(tags=["server"])

_MOST_LISTED = 200
"""Maximum number of listed adapters, of running requests, and of jobs."""
_LONGEST_ERROR = 300


class Counts(BaseModel):
    """Requests of the whole engine."""

    running: int
    waiting: int


class Tokens(BaseModel):
    """Tokens since the start, of the whole engine."""

    generated: int
    prompts: int
    cached: int
    trained: int


class Times(BaseModel):
    """Times of requests since the start, seconds, and the SLO's attainment.

    `counts[i]` are the samples in (bounds[i - 1], bounds[i]]; the last count is above all bounds.
    Of the finished `requests` with an SLO, `kept` met it.
    """

    bounds: list[float]
    counts: list[int]
    sum: float
    promised_s: float | None
    requests: int
    kept: int


class AdapterState(BaseModel):
    """An adapter that the key may use."""

    name: str
    tenant: str
    version: int
    digest: str | None
    method: str
    size_bytes: int
    running: int
    waiting: int
    is_resident: bool
    is_trained: bool


class RunningState(BaseModel):
    """A running request."""

    id: str
    tenant: str
    adapter: str | None
    prompt_tokens: int
    output_tokens: int
    age_s: float


class JobInfo(BaseModel):
    """A finetuning job."""

    name: str
    tenant: str
    state: str
    is_active: bool
    step: int
    total_steps: int | None
    loss: float | None
    error: str | None
    time_share: float
    tokens_per_second: float | None
    remaining_s: float | None
    waits: str | None


class EngineWide(BaseModel):
    """Numbers of the whole engine, of all tenants together."""

    requests: Counts
    tokens: Tokens
    pages: int
    free_pages: int
    latencies: dict[str, Times]


class ServerStatus(BaseModel):
    """The state of the server; times are seconds.

    `engine` is None for a key that may not see other tenants' use.
    """

    version: str
    model: str
    max_model_len: int | None
    has_chat_template: bool
    state: str
    key: str
    started_s: int
    time_s: float
    engine: EngineWide | None
    memory_bytes: dict[str, int]
    adapters: list[AdapterState]
    running: list[RunningState]
    jobs: list[JobInfo]


@router.get("/status")
async def status(service: ServiceDependency, caller: Infer) -> ServerStatus:
    """Return the state of the server."""
    engine = await asyncio.wrap_future(service.client.call(Status()))
    return await service.beside(caller, _status, service, engine, caller)


def _status(service: Service, engine: EngineStatus, caller: Caller) -> ServerStatus:
    tokenizer = service.client.tokenizer
    seen = _Seen(service.part(Catalog), engine, caller)
    shows_all = service.shows_engine(caller)
    return ServerStatus(
        version=__version__,
        model=service.part(Catalog).base.name,
        max_model_len=service.max_model_len,
        has_chat_template=tokenizer is not None and tokenizer.chat_template is not None,
        state=service.client.health().state.value,
        key=caller.key,
        started_s=service.created_s,
        time_s=time.monotonic(),
        engine=_engine_wide(service, engine.numbers) if shows_all else None,
        memory_bytes={**service.memory.bytes, "adapter_copies": engine.numbers.copies_bytes},
        adapters=seen.adapters(),
        running=seen.running(),
        jobs=seen.jobs(),
    )


def _engine_wide(service: Service, numbers: EngineNumbers) -> EngineWide:
    totals, facts = numbers.totals, service.client.facts
    return EngineWide(
        requests=Counts(running=numbers.running, waiting=numbers.queued),
        tokens=Tokens(
            generated=totals.output_tokens,
            prompts=totals.prompt_tokens,
            cached=totals.cached_tokens,
            trained=totals.finetuning_tokens,
        ),
        pages=numbers.pages,
        free_pages=numbers.free_pages,
        latencies={
            "ttft": _times(totals.ttft, facts.ttft_slo_s, totals.promised_ttft),
            "itl": _times(totals.itl, facts.tpot_slo_s, totals.promised_tpot),
            "e2el": _times(totals.e2el, None, Promised()),
        },
    )


def _times(times: Histogram, promised_s: float | None, promised: Promised) -> Times:
    return Times(
        bounds=list(times.bounds),
        counts=times.counts.copy(),
        sum=times.sum,
        promised_s=promised_s,
        requests=promised.requests,
        kept=promised.kept,
    )


class _Seen:
    """The adapters, requests and jobs that a caller may see."""

    def __init__(self, catalog: Catalog, engine: EngineStatus, caller: Caller) -> None:
        self._engine = engine
        self._owned = catalog.owned
        self._tenant = caller.tenant
        self._is_admin = Scope.ADMIN in caller.scopes

    def _sees(self, tenant: str) -> bool:
        return self._is_admin or tenant in ("", self._tenant)

    def adapters(self) -> list[AdapterState]:
        waiting = self._engine.numbers.totals.adapters.waiting.copy()
        owned = ((self._owned(adapter.name), adapter) for adapter in self._engine.adapters)
        seen = [pair for pair in owned if self._sees(pair[0].tenant)]
        seen.sort(key=lambda pair: (-pair[1].running, pair[0].name, pair[0].tenant))
        return [
            AdapterState(
                name=owner.name,
                tenant=owner.tenant,
                version=adapter.version.number,
                digest=adapter.version.known_digest,
                method=adapter.method,
                size_bytes=adapter.size_bytes,
                running=adapter.running,
                waiting=waiting[adapter.name],
                is_resident=adapter.pages > 0,
                is_trained=adapter.is_trained,
            )
            for owner, adapter in seen[:_MOST_LISTED]
        ]

    def running(self) -> list[RunningState]:
        return [
            RunningState(
                id=request.id,
                tenant=request.tenant,
                adapter=None if request.adapter is None else self._owned(request.adapter).name,
                prompt_tokens=request.prompt_tokens,
                output_tokens=request.output_tokens,
                age_s=request.age_s,
            )
            for request in self._engine.running
            if self._is_admin or request.tenant == self._tenant
        ][:_MOST_LISTED]

    def jobs(self) -> list[JobInfo]:
        owned = [(self._owned(job.name), job) for job in self._engine.jobs]
        seen = [(owner, job) for owner, job in owned if self._sees(owner.tenant)]
        return [self._job(owner, job) for owner, job in seen[::-1][:_MOST_LISTED]]

    def _job(self, owner: Owned, job: JobStatus) -> JobInfo:
        # An error may contain paths of the server, which only the operator may see.
        shows_error = self._is_admin and job.error is not None
        return JobInfo(
            name=owner.name,
            tenant=owner.tenant,
            state=job.state.value,
            is_active=job.state in (JobState.QUEUED, JobState.RUNNING, JobState.PAUSED),
            step=job.step,
            total_steps=job.total_steps,
            loss=job.loss,
            error=(job.error or "")[:_LONGEST_ERROR] if shows_error else None,
            time_share=job.time_share,
            tokens_per_second=job.tokens_per_second,
            remaining_s=job.remaining_s,
            waits=job.waits,
        )


# -------------------------------------------------------------------------------------------- page

page_router = APIRouter(include_in_schema=False)


@cache
def live_page() -> str:
    """Return the whole page, which has no external resources."""
    return page_environment("pcg.serve").get_template("live.html").render()


@page_router.get("/")
async def page() -> HTMLResponse:
    """Return the page, which asks for a key before it sends requests to the server."""
    return HTMLResponse(live_page(), headers=page_headers(live_page(), is_live=True))
