"""The metrics of our own: adapters, finetuning and promises, under `pcg:`.

Series of single adapters are of those that are used most, and `other` is the rest together
(`pcg.runtime.metrics.totals`), so that their number is bounded. The label of a job is
`finetune_job`: Prometheus has a `job` of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from pcg.runtime.metrics.report import Outcome
from pcg.runtime.metrics.status import EngineNumbers, JobStatus
from pcg.runtime.metrics.totals import AdapterSums, AdapterTotals, Totals
from pcg.serve.engine.engine_names import Owned, OwnedName
from pcg.serve.metrics.exposition import Exposition

_OTHERS = {"adapter": "other", "tenant": "*"}
"""The labels of all adapters without series of their own; no tenant is called so."""


def write_adapters(
    to: Exposition, found: AdapterTotals, in_host: Iterable[str], owned: OwnedName
) -> None:
    """Write the series of adapters; versions that have one name are one.

    Args:
        in_host: the names of the adapters that requests may name, which the host's memory has.
    """
    own = found.own
    groups: dict[Owned, list[str]] = {}
    for name in own:
        groups.setdefault(owned(name), []).append(name)
    each = [
        *((_labels("adapter", one), AdapterSums.of([own[name] for name in names]))
          for one, names in groups.items()),
        (_OTHERS, found.others),
    ]  # fmt: skip
    for field, words, now in (
        ("requests_running", "Requests of an adapter that run.", found.running.copy()),
        ("requests_waiting", "Requests of an adapter that wait.", found.waiting.copy()),
    ):
        to.gauges(f"pcg:adapter_{field}", words, _counted(groups, now))
    tiers = {"device": found.resident.copy(), "host": Counter(in_host)}
    to.gauges(
        "pcg:adapter_resident",
        "Versions of an adapter in the pool's pages, and in the host's memory.",
        [
            ({**labels, "tier": tier}, count)
            for tier, now in tiers.items()
            for labels, count in _counted(groups, now)
        ],
    )
    for series, words, field in (
        ("requests", "Requests of an adapter that came.", "requests"),
        ("prompt_tokens", "Tokens of its prompts that were read.", "prompt_tokens"),
        (
            "generation_tokens",
            "Tokens that its requests generated, at their ends.",
            "output_tokens",
        ),
    ):
        samples = [(labels, getattr(sums, field)) for labels, sums in each]
        to.counters(f"pcg:adapter_{series}", words, samples)
    words = "From a request's coming to its first token, by adapter. Seconds."
    times = [(labels, sums.ttft) for labels, sums in each]
    to.histograms("pcg:adapter_time_to_first_token_seconds", words, times)
    to.counter("pcg:adapter_loads", "How often an adapter was given pages.", found.paged_in)
    to.counter("pcg:adapter_evictions", "How often an adapter gave its pages up.", found.evicted)


def _counted(
    groups: Mapping[Owned, Sequence[str]], now: Counter[str]
) -> list[tuple[dict[str, str], int]]:
    """Return the samples of a count that there is now, which is used up."""
    shown = [
        (_labels("adapter", one), sum(now.pop(name, 0) for name in names))
        for one, names in groups.items()
    ]
    return [*shown, (_OTHERS, sum(now.values()))]


def write_jobs(to: Exposition, totals: Totals, jobs: Sequence[JobStatus], owned: OwnedName) -> None:
    """Write how far jobs are, and what they trained; of several with one name, the latest."""
    latest = {owned(job.name): job for job in jobs}
    named = [(_labels("finetune_job", one), job) for one, job in latest.items()]
    steps = [(labels, job.step) for labels, job in named]
    losses = [(labels, job.loss) for labels, job in named if job.loss is not None]
    tokens = [(labels, totals.job_tokens.get(job.name, 0)) for labels, job in named]
    to.gauges("pcg:finetune_step", "Steps of a job that are done.", steps)
    to.gauges("pcg:finetune_loss", "Mean loss of a job's last step.", losses)
    to.counters("pcg:finetune_tokens", "Tokens that jobs of this name trained.", tokens)
    words = "Tokens that a step trains beside what it serves, where it trains any."
    to.histogram("pcg:iteration_finetune_tokens", words, totals.window_steps)


def write_promises(to: Exposition, totals: Totals) -> None:
    """Write how the SLOs of requests were kept."""
    found = {"ttft": totals.promised_ttft, "tpot": totals.promised_tpot}
    words = "Requests with a promised latency that are over."
    to.counters(
        "pcg:slo_requests", words, [({"class": k}, one.requests) for k, one in found.items()]
    )
    words = "Those of them that finished within it."
    to.counters("pcg:slo_kept", words, [({"class": k}, one.kept) for k, one in found.items()])
    words = "The share of them since the start; there is none before the first."
    shares = [({"class": k}, one.share) for k, one in found.items() if one.share is not None]
    to.gauges("pcg:slo_attainment_ratio", words, shares)
    refused = totals.requests[Outcome.REFUSED] + totals.turned_away
    to.counter("pcg:requests_refused", "Requests that were refused when they came.", refused)


def write_memory(to: Exposition, numbers: EngineNumbers, kinds: Mapping[str, int]) -> None:
    """Write where the memory goes, and what is in the pool."""
    every = {**kinds, "adapter_copies": numbers.copies_bytes}
    sizes = [({"kind": kind}, size) for kind, size in every.items()]
    to.gauges("pcg:memory_bytes", "Bytes of the device by what has them.", sizes)
    to.gauge("pcg:waiting_prompt_tokens", "Tokens of prompts that wait.", numbers.waiting_tokens)


def write_late(to: Exposition, numbers: EngineNumbers) -> None:
    """Write what was made ready while requests waited for it."""
    words = "Kernels compiled and steps recorded since the warm-up, while requests waited."
    to.counters(
        "pcg:late_preparations", words, [({"kind": k}, count) for k, count in numbers.late.items()]
    )
    words = "Steps by why they were read before the next began, or once that had (ahead)."
    to.counters("pcg:steps_read", words, [({"why": k}, n) for k, n in numbers.reads.items()])


def _labels(of: str, owned: Owned) -> dict[str, str]:
    return {of: owned.name, "tenant": owned.tenant}
