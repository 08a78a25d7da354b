"""The status of a running engine: its health, numbers, adapters and jobs, at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from pcg.runtime.adapters.versions import AdapterVersion
from pcg.runtime.metrics.totals import Totals


class EngineState(StrEnum):
    """The state of an engine on a thread."""

    RUNNING = "running"
    DRAINING = "draining"
    ENDED = "ended"


class JobState(StrEnum):
    """The state of a job, in OpenAI's words where it has them."""

    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True)
class Health:
    """The health of an engine.

    Attributes:
        error: why the thread has ended; None while it runs.
        step_s: seconds since the running step began; None between two steps. A time far beyond
            other steps indicates a device that hangs.
    """

    state: EngineState
    error: str | None
    step_s: float | None


@dataclass(frozen=True)
class EngineNumbers:
    """The numbers of an engine: its present state, and sums since its start.

    Attributes:
        waiting, running: requests; `preparing` requests wait for their guides to be compiled.
        waiting_tokens: tokens of the waiting prompts.
        jobs: active jobs, by state.
        pages: pages of the pool; `free_pages` include those of unused adapters and prefixes.
        adapters: adapters that have pages.
        shares_prefixes: True if requests share the blocks of their common beginnings.
        late: kernels that were compiled and steps that were recorded while requests waited, by
            kind; empty on devices that record nothing.
        reads: steps that were read after the next step had begun, as "ahead", and others by the
            reason why they were read before.
        copies_bytes: bytes of the copies that adapters are served from, outside the pool.
    """

    waiting: int
    preparing: int
    running: int
    waiting_tokens: int
    jobs: Mapping[JobState, int]
    pages: int
    free_pages: int
    adapters: int
    shares_prefixes: bool
    late: Mapping[str, int]
    totals: Totals
    reads: Mapping[str, int] = field(default_factory=dict)
    copies_bytes: int = 0

    @property
    def queued(self) -> int:
        """Requests that do not run yet, including those with guides to compile."""
        return self.waiting + self.preparing

    @property
    def used_share(self) -> float:
        """The share of the pool's pages that something uses, from 0 to 1."""
        return (self.pages - self.free_pages) / self.pages


@dataclass(frozen=True)
class AdapterStatus:
    """An adapter that requests may name.

    Attributes:
        version: the version that answers new requests; reading its digest may compute it, reading
            `known_digest` never waits.
        method: its PEFT method, as LoRA.
        size_bytes: bytes of its tensors.
        running: admitted requests that use this version.
        pages: pages that it has in the pool; 0 while it is only in host memory.
        is_trained: True while a job trains an adapter of this name.
    """

    name: str
    version: AdapterVersion
    method: str
    size_bytes: int
    running: int
    pages: int
    is_trained: bool


@dataclass(frozen=True)
class RunningStatus:
    """A running request.

    Attributes:
        id: its id; for a further continuation of a prompt it ends in its place.
        adapter: the name of its adapter; None for the base.
        output_tokens: tokens that it has generated.
        age_s: seconds since its submission.
    """

    id: str
    tenant: str
    adapter: str | None
    prompt_tokens: int
    output_tokens: int
    age_s: float


@dataclass(frozen=True)
class JobStatus:
    """A job and its progress.

    Attributes:
        step: finished steps, including those before it was resumed.
        total_steps: steps of the whole job; None before the first step.
        loss: mean loss of the last step's target tokens; None before a step.
        checkpoint: the directory of its last checkpoint; None without a checkpoint.
        error: why it did not succeed; None unless it is over.
        time_share: share of the engine's time that it used since its first unit ran, from 0 to 1.
        tokens_per_second: tokens that it trained per second since it began; None before a step.
        remaining_s: estimated time until its end; None before a step and after the end.
        waits: why the latest steps ran nothing of it; None while it runs.
    """

    name: str
    state: JobState
    step: int
    total_steps: int | None
    loss: float | None
    checkpoint: Path | None
    error: str | None
    time_share: float = 0.0
    tokens_per_second: float | None = None
    remaining_s: float | None = None
    waits: str | None = None


@dataclass(frozen=True)
class EngineStatus:
    """The status of an engine: its numbers, adapters, running requests and jobs."""

    numbers: EngineNumbers
    adapters: list[AdapterStatus]
    running: list[RunningStatus]
    jobs: list[JobStatus]
