"""A serving report as tables."""

import pytest
from rich.console import Console
from rich.table import Table

from cli.bench_serve import latency_table, outcome_table
from pcg.runtime.metrics.events import Event, Kind
from pcg.runtime.metrics.report import ServingReport, Slo, serving_report


def printed(table: Table) -> dict[str, str]:
    """The lines by their first cell, as they come out on a narrow terminal."""
    console = Console(width=80, highlight=False, markup=False)
    with console.capture() as caught:
        console.print(table)
    lines = caught.get().splitlines()
    assert max(map(len, lines)) <= 80
    rows = (line.strip().split("  ", 1) for line in lines)
    return {head: rest[0].strip() if rest else "" for head, *rest in rows}


@pytest.fixture
def report() -> ServingReport:
    log = [
        Event(0.0, Kind.SUBMITTED, "a", {"prompt_tokens": 1500, "tenant": "x"}),
        Event(0.0, Kind.SUBMITTED, "b", {"prompt_tokens": 7, "tenant": "y"}),
        Event(0.25, Kind.ADMITTED, "a"),
        Event(0.5, Kind.TOKEN, "a", {"count": 1, "cached_tokens": 1008}),
        Event(0.5, Kind.PREEMPTED, "a"),
        Event(0.75, Kind.TIMED_OUT, "b"),
        Event(1.0, Kind.STEPPED, "job", {"tokens": 3000}),
        Event(2.0, Kind.TOKEN, "a", {"count": 1}),
        Event(2.0, Kind.FINISHED, "a"),
    ]
    return serving_report(log, Slo(ttft_s=1.0, tpot_s=1.0))


def test_latencies(report: ServingReport) -> None:
    found = printed(latency_table(report))
    assert found["time to first token"].split() == ["1", "500.0", "500.0", "500.0", "500.0"]
    assert found["inter-token latency"].split() == ["1", "1,500.0", *3 * ["1,500.0"]]
    assert found["queueing"].split()[:2] == ["1", "250.0"]
    empty = serving_report([Event(0.0, Kind.STARTED, "j"), Event(1.0, Kind.COMPLETED, "j")])
    assert printed(latency_table(empty))["queueing"].split() == ["0", "–", "–", "–", "–"]


def test_outcomes(report: ServingReport) -> None:
    found = printed(outcome_table(report))
    assert found["duration"] == "2.0 s"
    assert found["completed"] == found["timed out"] == "1"
    assert found["preempted"] == "1, 1 times"
    assert found["throughput"] == "0.50 requests/s"
    assert found["goodput"] == "0.00 requests/s"
    assert found["output"] == "1.0 tokens/s"
    assert found["prompts and output"] == "751.0 tokens/s"
    assert found["prefix cache"] == "1,008 tokens, 67.2% of prompts"
    assert found["SLO attainment"] == "0.0%"
    assert found["first token"] == "50.0%"
    assert found["user satisfaction"] == "37.5%"  # (1 − 0.5² + 0) / 2
    assert found["finetuning"] == "1,500.0 tokens/s, 1 steps"
    assert found["most served tenant / least"] == "–"
    assert found["Jain index of tenants"] == "0.500"
    assert "refused" not in found
    plain = printed(outcome_table(serving_report([*_alone()])))
    assert not {"goodput", "SLO attainment", "finetuning", "Jain index of tenants"} & set(plain)


def _alone() -> list[Event]:
    return [
        Event(0.0, Kind.SUBMITTED, "a", {"prompt_tokens": 5}),
        Event(1.0, Kind.TOKEN, "a", {"count": 1}),
        Event(1.0, Kind.FINISHED, "a"),
    ]
