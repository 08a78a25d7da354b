"""A serving report as tables: latencies, and what came of requests, tokens, SLOs and jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .console import table

if TYPE_CHECKING:
    from rich.table import Table

    from pcg.runtime.metrics.metrics import ServingReport

_TITLES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
    "queueing": "queueing",
}


def latency_table(report: ServingReport) -> Table:
    """Latencies of finished requests, in milliseconds; dashes where there is no sample."""
    heads = ("mean", "median", "p90", "p99")
    made = table("ms", "samples", *heads, right=("samples", *heads))
    for name, one in report.latencies.items():
        if one is None:
            made.add_row(_TITLES[name], "0", *("–" for _ in heads))
            continue
        numbers = (one.mean_s, one.median_s, one.p90_s, one.p99_s)
        made.add_row(_TITLES[name], f"{one.count:,}", *(f"{s * 1e3:,.1f}" for s in numbers))
    return made


def outcome_table(report: ServingReport) -> Table:
    """Outcomes of requests, tokens, SLOs, jobs and tenants; lines of nothing are left out."""
    found = report.to_json()
    made = table("serving", "", right=("",))
    made.add_row("duration", f"{report.duration_s:,.1f} s")
    made.add_row("requests", f"{len(report.requests):,}")
    for outcome in ("completed", "refused", "cancelled", "timed_out", "failed", "unfinished"):
        if outcome == "completed" or found[outcome]:
            made.add_row(f"  {outcome.replace('_', ' ')}", f"{found[outcome]:,}")
    if found["preempted"]:
        made.add_row("  preempted", f"{found['preempted']:,}, {found['preemptions']:,} times")
    made.add_row("throughput", f"{report.request_throughput:,.2f} requests/s")
    if report.request_goodput is not None:
        made.add_row("goodput", f"{report.request_goodput:,.2f} requests/s")
    made.add_row("output", f"{report.output_throughput:,.1f} tokens/s")
    made.add_row("prompts and output", f"{report.total_token_throughput:,.1f} tokens/s")
    if report.cached_tokens:
        rate = f"{report.prefix_cache_hit_rate:.1%} of prompts"
        made.add_row("prefix cache", f"{report.cached_tokens:,} tokens, {rate}")
    for title, share in (
        ("SLO attainment", report.slo_attainment),
        ("  first token", report.ttft_attainment),
        ("  further tokens", report.tpot_attainment),
        ("user satisfaction", report.user_satisfaction),
    ):
        if share is not None:
            made.add_row(title, f"{share:.1%}")
    if report.finetuning_steps:
        steps = f"{report.finetuning_steps:,} steps"
        made.add_row("finetuning", f"{report.finetuning_throughput:,.1f} tokens/s, {steps}")
    fairness = report.fairness
    if fairness is not None and len(fairness.service) > 1:
        ratio = fairness.max_min_ratio
        made.add_row("most served tenant / least", "–" if ratio is None else f"{ratio:,.2f}")
        made.add_row("Jain index of tenants", f"{fairness.jain_index:.3f}")
    return made
