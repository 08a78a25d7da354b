"""The status of an engine, read from any thread while its own thread runs steps."""

from __future__ import annotations

from collections import Counter

from pcg.kernels.sizes import PAGE_TOKENS
from pcg.peft.adapter import Adapter
from pcg.runtime.engine.loop import EngineLoop
from pcg.runtime.metrics.status import AdapterStatus, EngineNumbers, RunningStatus
from pcg.runtime.model.state import ModelState


def adapters_of(engine: EngineLoop, state: ModelState) -> list[AdapterStatus]:
    """Return the adapters that requests may name."""
    statuses = []
    for name, adapter in sorted(state.adapters.items()):
        pages, running = engine.scheduler.adapters.use_of(adapter)
        version = state.versions.of(adapter)
        assert version is not None
        statuses.append(
            AdapterStatus(
                name,
                version,
                adapter.recipe.method,
                adapter.size_bytes,
                running,
                pages,
                state.is_trained(name),
            )
        )
    return statuses


def running_of(engine: EngineLoop) -> list[RunningStatus]:
    """Return the running requests, in order of admission."""
    now_s = engine.clock.here_s()
    return [
        RunningStatus(
            sequence.id,
            sequence.request.tenant,
            None if sequence.request.adapter is None else sequence.request.adapter.name,
            len(sequence.request.prompt_ids),
            len(sequence.generated),
            now_s - sequence.times.submitted_s,
        )
        for sequence in list(engine.scheduler.running)
    ]


def numbers_of(engine: EngineLoop) -> EngineNumbers:
    """Return current numbers, and totals since the start."""
    scheduler, device = engine.scheduler, engine.device
    return EngineNumbers(
        waiting=len(scheduler.waiting),
        preparing=len(scheduler.preparing),
        running=len(scheduler.running),
        waiting_tokens=scheduler.backlog.tokens,
        jobs=Counter(job.state for job in (list(engine.jobs) if engine.has_jobs else ())),
        pages=scheduler.pool.size,
        free_pages=scheduler.pool.free + scheduler.adapters.idle_pages,
        adapters=len(scheduler.adapters),
        shares_prefixes=scheduler.prefixes is not None,
        late=device.late,
        reads=dict(engine.reads),
        totals=engine.totals,
        copies_bytes=device.copies_bytes,
    )


def most_tokens(engine: EngineLoop, adapter: Adapter | None) -> int:
    """Return the maximum length of prompt and output for which the pool has pages."""
    scheduler = engine.scheduler
    reserved = engine.jobs.pages.most if engine.has_jobs else 0
    pages = scheduler.pool.size - reserved - scheduler.adapters.pages_of(adapter)
    return pages * PAGE_TOKENS + 1  # the last token is never cached
