"""The metrics that have vLLM's names, meanings, labels and bounds.

Boards made for vLLM, and the endpoint pickers of llm-d and of the Gateway API inference extension,
read them as they are. Three differ on purpose: `vllm:lora_requests_info` lists the adapters that
have pages, as the pickers' protocol says and vLLM does not; it is one series, where vLLM leaves
every combination of names that there ever was; and adapters that wait are listed once, whether
they have pages or not.

Source: vllm/v1/metrics/loggers.py, and proposal 003, the model server protocol, of
kubernetes-sigs/gateway-api-inference-extension.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from pcg.kernels.sizes import PAGE_TOKENS
from pcg.runtime.metrics.report import Outcome
from pcg.runtime.metrics.status import EngineNumbers
from pcg.runtime.metrics.totals import AdapterTotals, Totals
from pcg.serve.engine.engine_names import OwnedName
from pcg.serve.metrics.exposition import Exposition


def write_state(to: Exposition, numbers: EngineNumbers) -> None:
    """Write what is there now: requests, and the use of the KV cache."""
    to.gauge("vllm:num_requests_running", "Requests that run.", numbers.running)
    to.gauge("vllm:num_requests_waiting", "Requests that wait.", numbers.queued)
    to.gauges(
        "vllm:num_requests_waiting_by_reason",
        "Requests that wait for room, or until their guides are compiled.",
        [({"reason": "capacity"}, numbers.waiting), ({"reason": "deferred"}, numbers.preparing)],
    )
    words = "Used share of the pool's pages, from 0 to 1."
    to.gauge("vllm:kv_cache_usage_perc", words, numbers.used_share)
    sizes = {
        "block_size": str(PAGE_TOKENS),
        "num_gpu_blocks": str(numbers.pages),
        "enable_prefix_caching": str(numbers.shares_prefixes),
    }
    to.gauge("vllm:cache_config_info", "The pool's size: a page's tokens, and pages.", 1, sizes)


def write_adapters(
    to: Exposition, found: AdapterTotals, most_adapters: int, owned: OwnedName
) -> None:
    """Write which adapters have pages and which have requests that wait, in one series."""
    labels = {
        "max_lora": str(most_adapters),
        "running_lora_adapters": _listed(found.resident.copy(), owned),
        "waiting_lora_adapters": _listed(found.waiting.copy(), owned),
    }
    to.gauges(
        "vllm:lora_requests_info",
        "Adapters with pages, and those that requests wait for; the value is the time.",
        [(labels, time.time())],
        with_common=False,
    )


def write_counts(to: Exposition, totals: Totals) -> None:
    """Write what was done since the start: tokens, preemptions and ended requests."""
    read, cached = totals.prompt_tokens, totals.cached_tokens
    to.counter("vllm:num_preemptions", "How often a request gave its pages up.", totals.preemptions)
    to.counter("vllm:prompt_tokens", "Tokens of prompts that were read.", read)
    to.counter("vllm:prompt_tokens_cached", "Those of them that were in the cache.", cached)
    sources = {"local_compute": read - cached, "local_cache_hit": cached, "external_kv_transfer": 0}
    to.counters(
        "vllm:prompt_tokens_by_source",
        "Tokens of prompts, computed and cached.",
        [({"source": source}, tokens) for source, tokens in sources.items()],
    )
    to.counter("vllm:generation_tokens", "Tokens that were generated.", totals.output_tokens)
    to.counter("vllm:prefix_cache_queries", "Tokens looked for in the prefix cache.", read)
    to.counter("vllm:prefix_cache_hits", "Tokens found in the prefix cache.", cached)
    ended = totals.requests
    reasons = {
        "stop": totals.finish_reasons["stop"],
        "length": totals.finish_reasons["length"],
        "abort": ended[Outcome.CANCELLED] + ended[Outcome.TIMED_OUT],
        "error": ended[Outcome.FAILED],
        "repetition": 0,
    }
    to.counters(
        "vllm:request_success",
        "Requests that are over, by how they ended.",
        [({"finished_reason": reason}, count) for reason, count in reasons.items()],
    )


def write_times(to: Exposition, totals: Totals) -> None:
    """Write the histograms of times, seconds."""
    for name, words, found in (
        ("time_to_first_token", "From a request's coming to its first token.", totals.ttft),
        ("inter_token_latency", "Gaps between neighbouring tokens.", totals.itl),
        ("request_time_per_output_token", "Mean gap of a request.", totals.tpot),
        ("e2e_request_latency", "From a request's coming to its end.", totals.e2el),
        ("request_queue_time", "From a request's coming to its admission.", totals.queueing),
        ("request_inference_time", "From its admission to its end.", totals.inference),
        ("request_prefill_time", "From its admission to its first token.", totals.prefill),
        ("request_decode_time", "From its first token to its end.", totals.decode),
    ):
        to.histogram(f"vllm:{name}_seconds", f"{words} Seconds.", found)


def write_sizes(to: Exposition, totals: Totals, max_model_len: int | None) -> None:
    """Write the histograms of tokens and of other numbers of requests."""
    for name, words, found in (
        ("request_prompt_tokens", "Tokens of a request's prompt.", totals.prompt_lengths),
        ("request_generation_tokens", "Tokens that a request generated.", totals.output_lengths),
        ("request_max_num_generation_tokens", "Those of its longest choice.", totals.longest),
        ("request_params_max_tokens", "The most tokens that it asked for.", totals.max_tokens),
    ):
        to.histogram(f"vllm:{name}", words, found, max_model_len)
    to.histogram("vllm:iteration_tokens_total", "Tokens that a step serves.", totals.steps)
    to.histogram("vllm:request_params_n", "Continuations of a prompt.", totals.choices)
    to.histogram("vllm:request_num_preemptions", "Preemptions of a request.", totals.preempted)


def _listed(names: Iterable[str], owned: OwnedName) -> str:
    """Return the names as the pickers split them: by commas, which no name may have."""
    found = {owned(name).name for name in names}
    return ",".join(sorted(name for name in found if "," not in name))
