"""vLLM's endpoints by which other people's trainers use a server as their sampler.

TRL's AsyncGRPO pauses the server, writes an adapter, loads it under a new name and resumes it
(docs/grpo.md). What is asked in between waits.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

from fastapi import APIRouter, Depends
from pydantic import BaseModel, Field

from pcg.keys import Scope
from pcg.runtime.engine.commands import GoOn, Pause
from pcg.serve.adapters.catalog import Catalog
from pcg.serve.http.caller import requires
from pcg.serve.http.service import ServiceDependency

router = APIRouter(tags=["server"])

PAUSE_S = 600.0
"""The longest pause: a client that never comes back stops nobody for longer."""


class ModelConfig(BaseModel):
    """The base: its name, its dtype as torch names it, and the most tokens."""

    model: str
    dtype: str
    max_model_len: int | None


class LoraConfig(BaseModel):
    """The adapters that can be there at once, and their highest rank."""

    max_lora_rank: int
    max_loras: int


class ParallelConfig(BaseModel):
    """One engine, which every adapter that is loaded reaches."""

    data_parallel_size: int = 1
    tensor_parallel_size: int = 1


class EngineConfig(BaseModel):
    """The configuration, as far as trainers read it.

    `lora_config` is None where no adapters can be loaded, as `--lora-roots` names no folder.
    """

    base: Annotated[ModelConfig, Field(serialization_alias="model_config")]
    lora_config: LoraConfig | None
    parallel_config: ParallelConfig
    weight_transfer_config: None = None


class ServerInfo(BaseModel):
    """The configuration, under vLLM's name."""

    vllm_config: EngineConfig


class State(BaseModel):
    """The state that the engine is in now."""

    status: Literal["paused", "resumed"]


@router.get("/server_info", dependencies=[Depends(requires(Scope.INFER))])
async def server_info(
    service: ServiceDependency, config_format: Literal["json"] = "json"
) -> ServerInfo:
    """Return the configuration as vLLM's trainers read it."""
    facts, options = service.client.facts, service.options
    loads = LoraConfig(max_lora_rank=options.max_lora_rank, max_loras=options.max_cpu_loras)
    base = ModelConfig(
        model=service.part(Catalog).base.name,
        dtype=facts.dtype,
        max_model_len=service.max_model_len,
    )
    config = EngineConfig(
        base=base,
        lora_config=loads if options.lora_roots else None,
        parallel_config=ParallelConfig(),
    )
    return ServerInfo(vllm_config=config)


@router.post("/pause", dependencies=[Depends(requires(Scope.ADMIN))])
async def pause(service: ServiceDependency, mode: Literal["keep"]) -> State:
    """Run no step until /resume, of requests or of jobs; they are kept, and new ones wait.

    It ends by itself after ten minutes, and where the server drains.
    """
    await asyncio.wrap_future(service.client.call(Pause(PAUSE_S)))
    return State(status="paused")


@router.post("/resume", dependencies=[Depends(requires(Scope.ADMIN))])
async def resume(service: ServiceDependency) -> State:
    """Run steps again."""
    await asyncio.wrap_future(service.client.call(GoOn()))
    return State(status="resumed")
