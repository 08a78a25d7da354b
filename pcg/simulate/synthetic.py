"""Synthetic workloads: arrivals, lengths and adapters combined.

Times, prompts, outputs and adapters have separate generators, so that a seed yields the same times
for any lengths, and the same requests for any adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import merge
from itertools import islice, takewhile
from random import Random

from pcg.errors import BenchmarkError
from pcg.simulate.distributions import Arrivals, Gamma, Lengths, Popularity, PowerLaw
from pcg.simulate.workload import TimedRequest, Workload, require_count, require_positive


def synthetic(
    arrivals: Arrivals,
    prompts: Lengths,
    outputs: Lengths,
    *,
    seed: int,
    duration_s: float | None = None,
    requests: int | None = None,
) -> Workload:
    """Return requests for the base model, up to a time or to a number of requests.

    Raises:
        BenchmarkError: neither or both of `duration_s` and `requests` are given, or no request
            arrives.
    """
    times = arrivals.times_s(Random(f"{seed} arrivals"))
    if (duration_s is None) == (requests is None):
        raise BenchmarkError(
            f"duration_s={duration_s} and requests={requests}; give one of the two"
        )
    if duration_s is not None:
        times = _until(times, duration_s)
    if requests is not None:
        require_count("requests", requests)
        times = islice(times, requests)
    return Workload(tuple(_requests(((time, None) for time in times), prompts, outputs, seed)))


def s_lora(
    popularity: PowerLaw,
    rate_per_s: float,
    cv: float,
    prompts: Lengths,
    outputs: Lengths,
    *,
    seed: int,
    duration_s: float = 300.0,
    adapters: Sequence[str] | None = None,
) -> Workload:
    """Return S-LoRA's synthetic trace: a Gamma process per adapter, with power-law rates.

    λ_i ∝ i^-α with Σ λ_i = rate, as in the paper's text. (S-LoRA's public code has a single Gamma
    process for all requests, with adapters drawn by `numpy.random.power`.)

    Args:
        popularity: the number of adapters, and α.
        rate_per_s: the rate of all adapters, R.
        cv: the coefficient of variation of each adapter's intervals.
        duration_s: the duration; five minutes in the paper.
        adapters: names, the most popular first; None for `adapter-0`, `adapter-1` …
    Raises:
        BenchmarkError: a parameter is out of range, names are too few, or no request arrives.
    Source: S-LoRA §7.2.
    """
    require_positive("rate_per_s", rate_per_s)
    names = _names(popularity.adapters, adapters)
    processes = (
        _named(Gamma(rate_per_s * share, cv), name, Random(f"{seed} arrivals {index}"), duration_s)
        for index, (name, share) in enumerate(zip(names, popularity.shares(1), strict=True))
    )
    return Workload(tuple(_requests(merge(*processes), prompts, outputs, seed)))


def assign_adapters(
    workload: Workload,
    popularity: Popularity,
    *,
    seed: int,
    adapters: Sequence[str] | None = None,
) -> Workload:
    """Return the workload with adapters assigned to its requests.

    Args:
        workload: requests; their adapters are replaced.
        popularity: the distribution of requests over adapters.
        adapters: names as in `s_lora`.
    Raises:
        BenchmarkError: too few names.
    """
    places = popularity.order(len(workload), Random(f"{seed} adapters"))
    names = _names(max(places) + 1, adapters)
    pairs = zip(workload, places, strict=True)
    return Workload(tuple(replace(request, adapter=names[place]) for request, place in pairs))


def assign_tenants(workload: Workload, tenants: Sequence[str]) -> Workload:
    """Assign adapters to tenants, in turn by each adapter's first request; return the workload.

    Requests for the base model belong to the first tenant.

    Raises:
        BenchmarkError: no tenants.
    """
    if not tenants:
        raise BenchmarkError("no tenants; give at least one name")
    owners = {name: tenants[i % len(tenants)] for i, name in enumerate(workload.adapters)}
    return Workload(
        tuple(
            replace(request, tenant=owners.get(request.adapter or "", tenants[0]))
            for request in workload
        )
    )


def _named(
    arrivals: Arrivals, adapter: str, random: Random, duration_s: float
) -> Iterator[tuple[float, str]]:
    return ((time, adapter) for time in _until(arrivals.times_s(random), duration_s))


def _until(times: Iterator[float], duration_s: float) -> Iterator[float]:
    require_positive("duration_s", duration_s)
    return takewhile(lambda time: time < duration_s, times)


def _requests(
    arrivals: Iterator[tuple[float, str | None]], prompts: Lengths, outputs: Lengths, seed: int
) -> Iterator[TimedRequest]:
    prompt_random, output_random = Random(f"{seed} prompts"), Random(f"{seed} outputs")
    for time, adapter in arrivals:
        lengths = prompts.draw(prompt_random), outputs.draw(output_random)
        yield TimedRequest(time, adapter, *lengths)


def _names(many: int, adapters: Sequence[str] | None) -> Sequence[str]:
    if adapters is None:
        return [f"adapter-{index}" for index in range(many)]
    if len(adapters) < many:
        raise BenchmarkError(f"{many} adapters are asked for and {len(adapters)} named; name more")
    return adapters[:many]
