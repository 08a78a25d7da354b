"""Replay of a workload on an engine: submit requests at their times, and report.

Prompts are random tokens of the workload's lengths; every output runs to its length, regardless of
the sampled tokens. Times are those of the engine's clock. A request that arrives during a step is
submitted after the step, and its latencies count from its arrival; an arrival ends a step without
requests early, as for an engine on a thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from random import Random

from pcg.errors import BenchmarkError, OutOfMemoryError, QueueFullError
from pcg.runtime.adapters.cache import ServedAdapter
from pcg.runtime.engine.loop import EngineLoop
from pcg.runtime.metrics.report import ServingReport, serving_report
from pcg.runtime.requests.request import Request
from pcg.runtime.sampling.sampling_params import SamplingParams
from pcg.simulate.workload import Workload, require_positive

_STUCK_S = 0.001
"""Time between a step without runnable work and the next step."""
_MOST_STUCK = 10_000
"""Maximum number of such steps in a row without a future arrival; then the replay is stuck."""


def replay(
    engine: EngineLoop,
    workload: Workload,
    adapters: Mapping[str, ServedAdapter],
    vocabulary: int,
    *,
    seed: int = 0,
    prefix_tokens: int = 0,
    most_positions: int | None = None,
    wait: Callable[[float], None] = time.sleep,
) -> ServingReport:
    """Serve a workload to the end of its last request, concurrently with the engine's jobs.

    Args:
        engine: an engine; its jobs continue after the end.
        adapters: the adapters by the workload's names.
        prefix_tokens: the number of tokens of a common prefix of all prompts.
        most_positions: the model's positions; None for any number.
        wait: advances the engine's clock by some seconds while the engine is idle.
    Returns:
        The report from the first submission to the end of the last request; refused requests count.
    Raises:
        BenchmarkError: a request names a missing adapter, exceeds the model's positions, or the
            remaining requests cannot run.
    """
    requests = _requests(workload, adapters, vocabulary, seed, prefix_tokens, most_positions)
    log, end_recording = engine.log.recording()
    start_s = engine.clock.now_s()
    try:
        _replay(engine, workload, requests, start_s, wait)
    finally:
        engine.awaited = None
        end_recording()
    return serving_report(log, start_s=start_s, end_s=engine.clock.now_s())


def _replay(
    engine: EngineLoop,
    workload: Workload,
    requests: list[Request],
    start_s: float,
    wait: Callable[[float], None],
) -> None:
    scheduler, clock = engine.scheduler, engine.clock
    next_ = stuck = 0

    def has_come() -> bool:
        is_left = next_ < len(requests)
        return is_left and start_s + workload.requests[next_].time_s <= clock.now_s()

    engine.awaited = has_come
    while next_ < len(requests) or scheduler.waiting or scheduler.running:
        now_s = clock.now_s()
        while next_ < len(requests) and start_s + workload.requests[next_].time_s <= now_s:
            with suppress(
                OutOfMemoryError, QueueFullError
            ):  # the log records the refusal with its reason
                engine.submit(requests[next_], start_s + workload.requests[next_].time_s)
            next_ += 1
        if not engine.is_idle:
            engine.step()
            stuck = 0 if engine.worked else stuck + 1
            if engine.worked:
                continue
        if next_ < len(requests):
            left_s = start_s + workload.requests[next_].time_s - clock.now_s()
            wait(max(min(left_s, left_s if engine.is_idle else _STUCK_S), 0.0))
        elif stuck > _MOST_STUCK:
            raise BenchmarkError(
                f"{len(scheduler.waiting)} requests wait, and none can run: {engine.pool.free} of "
                f"{engine.pool.size} pages are free; resume or cancel the jobs that hold the others"
            )
        elif stuck:
            wait(_STUCK_S)


def train(engine: EngineLoop, seconds: float) -> ServingReport:
    """Run an engine's jobs without requests for some seconds, or to their end.

    Raises:
        BenchmarkError: the time is not above 0, or the engine has no job.
    """
    require_positive("seconds", seconds)
    if not engine.jobs:
        raise BenchmarkError("no finetuning job to run alone; give the engine one first")
    log, end_recording = engine.log.recording()
    start_s = engine.clock.now_s()
    while not engine.is_idle and engine.clock.now_s() - start_s < seconds:
        engine.step()
    end_recording()
    return serving_report(log, start_s=start_s, end_s=engine.clock.now_s())


def _requests(
    workload: Workload,
    adapters: Mapping[str, ServedAdapter],
    vocabulary: int,
    seed: int,
    prefix_tokens: int,
    most_positions: int | None,
) -> list[Request]:
    missing = [name for name in workload.adapters if name not in adapters]
    if missing:
        raise BenchmarkError(
            f"the workload asks for adapter {missing[0]!r}, the first of {len(missing)} that are "
            f"not among the {len(adapters)} there are; add them, or assign the requests anew"
        )
    random = Random(f"{seed} tokens")
    prefix = tuple(Random(f"{seed} prefix").choices(range(vocabulary), k=prefix_tokens))
    requests = []
    for index, timed in enumerate(workload):
        request = Request(
            prefix + tuple(random.choices(range(vocabulary), k=timed.prompt_tokens)),
            SamplingParams(max_new_tokens=timed.output_tokens, ignore_eos=True),
            None if timed.adapter is None else adapters[timed.adapter],
            tenant=timed.tenant or "",
        )
        if most_positions is not None and request.length + timed.output_tokens > most_positions:
            raise BenchmarkError(
                f"request {index} has {request.length} tokens and asks for {timed.output_tokens}, "
                f"and the model has {most_positions} positions; use shorter lengths"
            )
        requests.append(request)
    return requests
