"""The options of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pcg.errors import EngineError
from pcg.runtime.admission.backlog import QueueLimits
from pcg.runtime.admission.latency import Latencies
from pcg.runtime.admission.limits import Limits
from pcg.runtime.admission.policy import Policy
from pcg.runtime.data.sources import DataLimits
from pcg.runtime.engine.scheduling.work import Sharing
from pcg.runtime.metrics.events import EventLog
from pcg.runtime.training.recorded.warm_job import WarmJob

KV_CACHE_BYTES = 4 * 2**30
"""Default memory for the KV cache and adapters on devices other than GPUs."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of an engine, on a device or a simulated one.

    Attributes:
        policy: the order in which requests are admitted; by default tenants have equal shares, and
            the requests of a tenant run in order of arrival.
        queue: limits of waiting requests; further requests are refused; `QueueLimits()` by default.
        job_share: the largest share of the pool's pages for finetuning.
        log: the event log to write to; by default a log of the last 65,536 events.
        latencies: predicted times of steps; by default measured when the engine is created.
        sharing: the rule of how much finetuning goes into a step; by default as much as fits within
            the SLOs.
        prefix_caching: let requests with the same version of an adapter share the KV blocks of
            common prefixes.
        prefixes_between_tenants: let different tenants share prefixes, too; `cached_tokens` then
            reveals prompts of other tenants.
    """

    policy: Policy | None = None
    queue: QueueLimits | None = None
    job_share: float = 0.5
    log: EventLog | None = None
    latencies: Latencies | None = None
    sharing: Sharing | None = None
    prefix_caching: bool = True
    prefixes_between_tenants: bool = False


@dataclass(frozen=True)
class EngineArguments(EngineOptions):
    """Arguments of `Executor.engine`.

    Attributes:
        limits: the limits of a step, and the SLOs; `Limits()` by default.
        kv_cache_bytes: memory of the pool for the KV cache and adapters; by default the rest of
            `gpu_memory_utilization` on a GPU, and 4 GiB elsewhere, where unused pages are not
            touched.
        gpu_memory_utilization: the share of a GPU's memory for this process, from above 0 to 1:
            weights, adapters, steps, graphs, windows of known jobs, and the pool, which gets the
            rest. Memory of other processes does not count, but this share has to be free. Ignored
            with `kv_cache_bytes`.
        warm_up: record possible steps, and compile their kernels, when the engine is created, so
            that no request waits for it; windows of jobs, too, if the program was compiled for a
            recipe and a step. Only where steps are recorded (docs/kernels.md).
        warm_jobs: further jobs whose windows a warm-up records.
        data_limits: limits of a job's data, and of jobs under preparation; `DataLimits()` by
            default.
        adapter_self_test: refuse a loaded adapter with weights that have no effect on the logits;
            tested between steps, once for each set of modules and shapes.
    """

    limits: Limits | None = None
    kv_cache_bytes: int | None = field(default=None, kw_only=True)
    gpu_memory_utilization: float = field(default=0.9, kw_only=True)

    def __post_init__(self) -> None:
        share = self.gpu_memory_utilization
        if not isinstance(share, int | float) or not 0 < share <= 1:
            raise EngineError(
                f"gpu_memory_utilization={share!r}; use a share of the GPU's memory above 0, up to "
                "1, such as 0.9"
            )

    warm_up: bool = field(default=False, kw_only=True)
    warm_jobs: Sequence[WarmJob] = field(default=(), kw_only=True)
    data_limits: DataLimits | None = field(default=None, kw_only=True)
    adapter_self_test: bool = field(default=False, kw_only=True)
