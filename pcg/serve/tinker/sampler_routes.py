"""/tinker/api/v1: sampling sessions and samples."""

from __future__ import annotations

from fastapi import APIRouter, Request

from pcg.serve.http.service import LongBodyRoute, ServiceDependency
from pcg.serve.tinker.samplers import Samplers
from pcg.serve.tinker.sampling_wire import (
    SampleBody,
    Sampler,
    SamplingSession,
    SamplingSessionBody,
)
from pcg.serve.tinker.session_routes import PREFIX, Trainer
from pcg.serve.tinker.tinker import promise_of
from pcg.serve.tinker.wire import Promise

router = APIRouter(prefix=PREFIX, tags=["tinker"], route_class=LongBodyRoute)


@router.post("/create_sampling_session")
async def create_sampling_session(
    body: SamplingSessionBody, service: ServiceDependency, caller: Trainer
) -> SamplingSession:
    """Open a sampling session of the base or of a checkpoint."""
    made = await service.part(Samplers).create(caller.tenant, body)
    return SamplingSession(sampling_session_id=made.id)


@router.get("/samplers/{sampler_id}")
async def get_sampler(sampler_id: str, service: ServiceDependency, caller: Trainer) -> Sampler:
    """Return what a sampling session samples from."""
    found = await service.part(Samplers).find(caller.tenant, sampler_id)
    return Sampler(sampler_id=found.id, base_model=found.base_model, model_path=found.path)


@router.post("/asample")
async def asample(
    body: SampleBody, request: Request, service: ServiceDependency, caller: Trainer
) -> Promise:
    """Promise samples."""
    return promise_of(await service.part(Samplers).sample(caller, body, await request.body()))
