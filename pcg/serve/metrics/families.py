"""The families of metrics: vLLM's, under its names, and pcg's for adapters, finetuning and SLOs.

vLLM's families have its names, meanings, labels and bounds, so that boards for vLLM, and the
endpoint pickers of llm-d and of the Gateway API inference extension, can read them unchanged. Three
details differ on purpose: `vllm:lora_requests_info` lists the resident adapters, as the pickers'
protocol says and vLLM does not; it has a single series, where vLLM keeps every past combination of
names; and waiting adapters are listed once, resident or not.

pcg's families start with `pcg:`. The most used adapters have their own series, and `other` is the
sum of the rest (`pcg.runtime.metrics.totals`), so the number of series is bounded. The label of a
job is `finetune_job`, because Prometheus reserves `job`.

Source: vllm/v1/metrics/loggers.py, and proposal 003, the model server protocol, of
kubernetes-sigs/gateway-api-inference-extension.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeAlias

from prometheus_client import Metric
from prometheus_client.utils import floatToGoString

from pcg.kernels.sizes import PAGE_TOKENS
from pcg.runtime.metrics.report import Outcome
from pcg.runtime.metrics.status import EngineNumbers, JobStatus
from pcg.runtime.metrics.totals import AdapterSums, AdapterTotals, Histogram, Totals
from pcg.serve.engine.engine_names import Owned, OwnedName

Labels: TypeAlias = Mapping[str, str]
Value: TypeAlias = float | Sequence[tuple[Labels, float]]
"""The value of a family with a single series, or labels and values of several series."""

_OTHERS = {"adapter": "other", "tenant": "*"}
"""Labels of the adapters without their own series; no tenant has this name."""


@dataclass(frozen=True)
class Served:
    """Facts of a server for its metrics, besides the engine's numbers.

    Attributes:
        model: name of the base model.
        max_model_len: the most tokens of a sequence; None without a limit.
        most_adapters: the most adapters of a step.
        memory_bytes: bytes of the device's memory by use.
        owned: maps the engine's name of an adapter or a job to its owner.
    """

    model: str
    max_model_len: int | None
    most_adapters: int
    memory_bytes: Mapping[str, int] = field(default_factory=dict)
    owned: OwnedName = lambda name: Owned("", name)


class Families:
    """Creates the metric families of a server; all series have the model's name as a label."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._common = {"model_name": served.model, "engine": "0"}

    def state(self, numbers: EngineNumbers) -> Iterator[Metric]:
        """Yield the present state: requests, the KV cache, and resident adapters."""
        gauge, served = self._gauge, self._served
        yield gauge("vllm:num_requests_running", "Running requests.", numbers.running)
        yield gauge("vllm:num_requests_waiting", "Waiting requests.", numbers.queued)
        yield gauge(
            "vllm:num_requests_waiting_by_reason",
            "Requests that wait for room, or for the compilation of their guides.",
            _by("reason", {"capacity": numbers.waiting, "deferred": numbers.preparing}),
        )
        words = "Used share of the pool's pages, from 0 to 1."
        yield gauge("vllm:kv_cache_usage_perc", words, numbers.used_share)
        sizes = {
            "block_size": str(PAGE_TOKENS),
            "num_gpu_blocks": str(numbers.pages),
            "enable_prefix_caching": str(numbers.shares_prefixes),
        }
        words = "The pool's size: a page's tokens, and pages."
        yield gauge("vllm:cache_config_info", words, [(sizes, 1)])
        adapters = numbers.totals.adapters
        labels = {
            "max_lora": str(served.most_adapters),
            "running_lora_adapters": self._listed(adapters.resident.copy()),
            "waiting_lora_adapters": self._listed(adapters.waiting.copy()),
        }
        words = "Resident adapters, and adapters of waiting requests; the value is the time."
        info = Metric("vllm:lora_requests_info", words, "gauge")
        info.add_sample(info.name, labels, time.time())
        yield info

    def counts(
        self, numbers: EngineNumbers, jobs: Sequence[JobStatus], in_host: Iterable[str]
    ) -> Iterator[Metric]:
        """Yield the totals since the start.

        Args:
            in_host: names of the adapters in host memory.
        """
        totals = numbers.totals
        yield from self._requests(totals)
        yield from self._distributions(totals)
        yield from self._adapters(totals.adapters, in_host)
        yield from self._jobs(totals, jobs)
        yield from self._promises(totals)
        yield from self._memory(numbers)

    # ------------------------------------------------------------------------------- vLLM's

    def _requests(self, totals: Totals) -> Iterator[Metric]:
        counter, ended = self._counter, totals.requests
        read, cached = totals.prompt_tokens, totals.cached_tokens
        words = "Preemptions of requests."
        yield counter("vllm:num_preemptions", words, totals.preemptions)
        yield counter("vllm:prompt_tokens", "Prompt tokens processed.", read)
        yield counter("vllm:prompt_tokens_cached", "Prompt tokens found in the cache.", cached)
        sources = {"local_compute": read - cached, "local_cache_hit": cached}
        yield counter(
            "vllm:prompt_tokens_by_source",
            "Prompt tokens, computed and cached.",
            _by("source", {**sources, "external_kv_transfer": 0}),
        )
        yield counter("vllm:generation_tokens", "Generated tokens.", totals.output_tokens)
        yield counter("vllm:prefix_cache_queries", "Tokens looked for in the prefix cache.", read)
        yield counter("vllm:prefix_cache_hits", "Tokens found in the prefix cache.", cached)
        reasons = {
            "stop": totals.finish_reasons["stop"],
            "length": totals.finish_reasons["length"],
            "abort": ended[Outcome.CANCELLED] + ended[Outcome.TIMED_OUT],
            "error": ended[Outcome.FAILED],
            "repetition": 0,
        }
        words = "Finished requests, by finish reason."
        yield counter("vllm:request_success", words, _by("finished_reason", reasons))

    def _distributions(self, totals: Totals) -> Iterator[Metric]:
        for name, words, times in (
            ("time_to_first_token", "From arrival to the first token.", totals.ttft),
            ("inter_token_latency", "Gaps between consecutive tokens.", totals.itl),
            ("request_time_per_output_token", "Mean gap of a request.", totals.tpot),
            ("e2e_request_latency", "From arrival to the end.", totals.e2el),
            ("request_queue_time", "From arrival to admission.", totals.queueing),
            ("request_inference_time", "From admission to the end.", totals.inference),
            ("request_prefill_time", "From admission to the first token.", totals.prefill),
            ("request_decode_time", "From the first token to the end.", totals.decode),
        ):
            yield self._histogram(f"vllm:{name}_seconds", f"{words} Seconds.", [({}, times)])
        for name, words, sizes in (
            ("request_prompt_tokens", "Prompt tokens of a request.", totals.prompt_lengths),
            ("request_generation_tokens", "Generated tokens of a request.", totals.output_lengths),
            ("request_max_num_generation_tokens", "Tokens of the longest choice.", totals.longest),
            ("request_params_max_tokens", "Maximum tokens set by a request.", totals.max_tokens),
        ):
            most = self._served.max_model_len
            yield self._histogram(f"vllm:{name}", words, [({}, sizes)], most)
        for name, words, numbers in (
            ("iteration_tokens_total", "Served tokens of a step.", totals.steps),
            ("request_params_n", "Continuations of a prompt.", totals.choices),
            ("request_num_preemptions", "Preemptions of a request.", totals.preempted),
        ):
            yield self._histogram(f"vllm:{name}", words, [({}, numbers)])

    def _listed(self, names: Iterable[str]) -> str:
        """Join names by commas, as the pickers split them; omit names with a comma."""
        owned = {self._served.owned(name).name for name in names}
        return ",".join(sorted(name for name in owned if "," not in name))

    # --------------------------------------------------------------------------------- ours

    def _adapters(self, totals: AdapterTotals, in_host: Iterable[str]) -> Iterator[Metric]:
        """Yield the series of adapters; versions of a name are added up."""
        sums = totals.own
        groups: dict[Owned, list[str]] = {}
        for name in sums:
            groups.setdefault(self._served.owned(name), []).append(name)

        def counted(now: Counter[str]) -> list[tuple[dict[str, str], int]]:
            """Return the samples of a counter; its entries are consumed."""
            shown = [
                (_labels("adapter", owner), sum(now.pop(name, 0) for name in names))
                for owner, names in groups.items()
            ]
            return [*shown, (_OTHERS, sum(now.values()))]

        each = [
            (_labels("adapter", owner), AdapterSums.of([sums[name] for name in names]))
            for owner, names in groups.items()
        ]
        each.append((_OTHERS, totals.others))
        running, waiting = totals.running.copy(), totals.waiting.copy()
        words = "Running requests of an adapter."
        yield self._gauge("pcg:adapter_requests_running", words, counted(running))
        words = "Waiting requests of an adapter."
        yield self._gauge("pcg:adapter_requests_waiting", words, counted(waiting))
        tiers = {"device": totals.resident.copy(), "host": Counter(in_host)}
        yield self._gauge(
            "pcg:adapter_resident",
            "Versions of an adapter in the pool's pages, and in the host's memory.",
            [
                ({**labels, "tier": tier}, count)
                for tier, now in tiers.items()
                for labels, count in counted(now)
            ],
        )
        for series, words, attribute in (
            ("requests", "Received requests of an adapter.", "requests"),
            ("prompt_tokens", "Prompt tokens of an adapter.", "prompt_tokens"),
            ("generation_tokens", "Generated tokens of finished requests.", "output_tokens"),
        ):
            samples = [(labels, getattr(adapter, attribute)) for labels, adapter in each]
            yield self._counter(f"pcg:adapter_{series}", words, samples)
        words = "From arrival to the first token, by adapter. Seconds."
        times = [(labels, adapter.ttft) for labels, adapter in each]
        yield self._histogram("pcg:adapter_time_to_first_token_seconds", words, times)
        words = "Loads of adapters into pages."
        yield self._counter("pcg:adapter_loads", words, totals.paged_in)
        words = "Evictions of adapters from pages."
        yield self._counter("pcg:adapter_evictions", words, totals.evicted)

    def _jobs(self, totals: Totals, jobs: Sequence[JobStatus]) -> Iterator[Metric]:
        """Yield the progress and the tokens of jobs; of jobs with the same name, the last."""
        latest = {self._served.owned(job.name): job for job in jobs}
        named = [(_labels("finetune_job", owner), job) for owner, job in latest.items()]
        steps = [(labels, job.step) for labels, job in named]
        losses = [(labels, job.loss) for labels, job in named if job.loss is not None]
        tokens = [(labels, totals.job_tokens.get(job.name, 0)) for labels, job in named]
        yield self._gauge("pcg:finetune_step", "Completed steps of a job.", steps)
        yield self._gauge("pcg:finetune_loss", "Mean loss of a job's last step.", losses)
        words = "Trained tokens of jobs with the name."
        yield self._counter("pcg:finetune_tokens", words, tokens)
        words = "Trained tokens of a step that trains."
        yield self._histogram("pcg:iteration_finetune_tokens", words, [({}, totals.window_steps)])

    def _promises(self, totals: Totals) -> Iterator[Metric]:
        promises = {"ttft": totals.promised_ttft, "tpot": totals.promised_tpot}
        words = "Finished requests with an SLO."
        requests = {kind: promised.requests for kind, promised in promises.items()}
        yield self._counter("pcg:slo_requests", words, _by("class", requests))
        words = "Finished requests that met their SLO."
        kept = {kind: promised.kept for kind, promised in promises.items()}
        yield self._counter("pcg:slo_kept", words, _by("class", kept))
        words = "Share of the requests that met their SLO since the start; absent before the first."
        shares = {kind: p.share for kind, p in promises.items() if p.share is not None}
        yield self._gauge("pcg:slo_attainment_ratio", words, _by("class", shares))
        refused = totals.requests[Outcome.REFUSED] + totals.turned_away
        words = "Requests refused on arrival."
        yield self._counter("pcg:requests_refused", words, refused)

    def _memory(self, numbers: EngineNumbers) -> Iterator[Metric]:
        words = "Kernels compiled and steps recorded after the warm-up, which delayed requests."
        yield self._counter("pcg:late_preparations", words, _by("kind", numbers.late))
        words = "Steps, by why they were read before the next step began; else 'ahead'."
        yield self._counter("pcg:steps_read", words, _by("why", numbers.reads))
        sizes = {**self._served.memory_bytes, "adapter_copies": numbers.copies_bytes}
        words = "Bytes of the device's memory, by use."
        yield self._gauge("pcg:memory_bytes", words, _by("kind", sizes))
        words = "Prompt tokens of waiting requests."
        yield self._gauge("pcg:waiting_prompt_tokens", words, numbers.waiting_tokens)

    # ----------------------------------------------------------------------------- families

    def _gauge(self, name: str, words: str, value: Value) -> Metric:
        return self._family(Metric(name, words, "gauge"), name, value)

    def _counter(self, name: str, words: str, value: Value) -> Metric:
        return self._family(Metric(name, words, "counter"), f"{name}_total", value)

    def _family(self, family: Metric, series: str, value: Value) -> Metric:
        for labels, number in value if isinstance(value, Sequence) else [({}, value)]:
            family.add_sample(series, {**self._common, **labels}, number)
        return family

    def _histogram(
        self,
        name: str,
        words: str,
        samples: Iterable[tuple[Labels, Histogram]],
        most: float | None = None,
    ) -> Metric:
        """Return a family of histograms, without bounds above `most`, the samples' limit."""
        family = Metric(name, words, "histogram")
        for labels, histogram in samples:
            whole = {**self._common, **labels}
            counts = histogram.counts.copy()  # atomic; the engine's thread keeps counting
            bounds = [*histogram.bounds, math.inf]
            for bound, count in zip(bounds, accumulate(counts), strict=True):
                if most is None or bound <= most or bound == math.inf:
                    le = floatToGoString(bound)
                    family.add_sample(f"{name}_bucket", {**whole, "le": le}, count)
            family.add_sample(f"{name}_count", whole, sum(counts))
            family.add_sample(f"{name}_sum", whole, histogram.sum)
        return family


def _by(label: str, numbers: Mapping[str, float]) -> list[tuple[Labels, float]]:
    return [({label: name}, number) for name, number in numbers.items()]


def _labels(kind: str, owner: Owned) -> dict[str, str]:
    return {kind: owner.name, "tenant": owner.tenant}
