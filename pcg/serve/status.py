"""GET /status: the state of the server that the page shows, as far as a key may see it.

Nothing of other tenants is in it: adapters, running requests and jobs are those of the caller's
tenant and of the operator, or all for a key with the scope `admin`. Numbers of the whole engine,
which tell what others do, are for the scopes `admin` and `metrics`, and for the one tenant of a
server that has no other.
"""

from __future__ import annotations

import asyncio
import time
from typing import Annotated

from fastapi import APIRouter, Depends
from pydantic import BaseModel

from pcg.keys import Scope
from pcg.runtime.engine.commands import Status
from pcg.runtime.metrics.status import (
    AdapterStatus,
    EngineNumbers,
    EngineStatus,
    JobState,
    JobStatus,
)
from pcg.runtime.metrics.totals import Histogram, Promised, Totals
from pcg.serve.adapters.catalog import Catalog
from pcg.serve.engine.engine_names import Owned
from pcg.serve.http.caller import Caller, requires
from pcg.serve.http.service import Service, ServiceDependency
from pcg.version import __version__

router = APIRouter(tags=["server"])

_MOST_LISTED = 200
"""The most adapters, running requests and jobs that are listed, each."""


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
    """Times of requests since the start, seconds, and how they were promised.

    `counts` are the samples up to each of `bounds` and above the one before, and last those above
    all. Of the `requests` with a promise that are over, `kept` ended within it.
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
    """A request that runs."""

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

    `engine` is None for a key that may not see what other tenants do.
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
async def status(
    service: ServiceDependency, caller: Annotated[Caller, Depends(requires(Scope.INFER))]
) -> ServerStatus:
    """Return the state of the server."""
    found = await asyncio.wrap_future(service.client.call(Status()))
    return await service.beside(caller, _status, service, found, caller)


def _status(service: Service, found: EngineStatus, caller: Caller) -> ServerStatus:
    tokenizer = service.client.tokenizer
    seen = _Seen(service, found, caller)
    return ServerStatus(
        version=__version__,
        model=service.part(Catalog).base.name,
        max_model_len=service.max_model_len,
        has_chat_template=tokenizer is not None and tokenizer.chat_template is not None,
        state=service.client.health().state.value,
        key=caller.key,
        started_s=service.created_s,
        time_s=time.monotonic(),
        engine=_engine_wide(service, found.numbers) if seen.sees_all else None,
        memory_bytes={**service.memory.bytes, "adapter_copies": found.numbers.copies_bytes},
        adapters=seen.adapters(),
        running=seen.running(),
        jobs=seen.jobs(),
    )


def _engine_wide(service: Service, numbers: EngineNumbers) -> EngineWide:
    totals = numbers.totals
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
        latencies=_latencies(service, totals),
    )


def _latencies(service: Service, totals: Totals) -> dict[str, Times]:
    facts = service.client.facts
    return {
        "ttft": _times(totals.ttft, facts.ttft_slo_s, totals.promised_ttft),
        "itl": _times(totals.itl, facts.tpot_slo_s, totals.promised_tpot),
        "e2el": _times(totals.e2el, None, Promised()),
    }


def _times(found: Histogram, promised_s: float | None, promised: Promised) -> Times:
    return Times(
        bounds=list(found.bounds),
        counts=found.counts.copy(),
        sum=found.sum,
        promised_s=promised_s,
        requests=promised.requests,
        kept=promised.kept,
    )


class _Seen:
    """The adapters, requests and jobs that a caller may see.

    Attributes:
        sees_all: True if it may see numbers of all tenants together.
    """

    def __init__(self, service: Service, found: EngineStatus, caller: Caller) -> None:
        self._found = found
        self._owned = service.part(Catalog).owned
        self._tenant = caller.tenant
        self._is_admin = Scope.ADMIN in caller.scopes
        self.sees_all = service.shows_engine(caller)

    def _sees(self, tenant: str) -> bool:
        return self._is_admin or tenant in ("", self._tenant)

    def adapters(self) -> list[AdapterState]:
        waiting = self._found.numbers.totals.adapters.waiting.copy()
        found = ((self._owned(one.name), one) for one in self._found.adapters)
        seen = [pair for pair in found if self._sees(pair[0].tenant)]
        seen.sort(key=lambda pair: (-pair[1].running, pair[0].name, pair[0].tenant))
        return [
            _adapter(owner.tenant, owner.name, one, waiting[one.name])
            for owner, one in seen[:_MOST_LISTED]
        ]

    def running(self) -> list[RunningState]:
        return [
            RunningState(
                id=one.id,
                tenant=one.tenant,
                adapter=None if one.adapter is None else self._owned(one.adapter).name,
                prompt_tokens=one.prompt_tokens,
                output_tokens=one.output_tokens,
                age_s=one.age_s,
            )
            for one in self._found.running
            if self._is_admin or one.tenant == self._tenant
        ][:_MOST_LISTED]

    def jobs(self) -> list[JobInfo]:
        found = [(self._owned(job.name), job) for job in self._found.jobs]
        seen = [(one, job) for one, job in found if self._sees(one.tenant)]
        return [_job(one, job, self._is_admin) for one, job in seen[::-1][:_MOST_LISTED]]


def _adapter(tenant: str, name: str, one: AdapterStatus, waiting: int) -> AdapterState:
    return AdapterState(
        name=name,
        tenant=tenant,
        version=one.version.number,
        digest=one.version.known_digest,
        method=one.method,
        size_bytes=one.size_bytes,
        running=one.running,
        waiting=waiting,
        is_resident=one.pages > 0,
        is_trained=one.is_trained,
    )


def _job(owned: Owned, job: JobStatus, is_admin: bool) -> JobInfo:
    """Return a job; why it failed may name paths of the server, which only the operator reads."""
    return JobInfo(
        name=owned.name,
        tenant=owned.tenant,
        state=job.state.value,
        is_active=job.state in (JobState.QUEUED, JobState.RUNNING, JobState.PAUSED),
        step=job.step,
        total_steps=job.total_steps,
        loss=job.loss,
        error=job.error[:_LONGEST_ERROR] if is_admin and job.error is not None else None,
        time_share=job.time_share,
        tokens_per_second=job.tokens_per_second,
        remaining_s=job.remaining_s,
        waits=job.waits,
    )
