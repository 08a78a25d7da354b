"""`pcg simulate`: seconds of each experiment, as tables and as JSON."""

from __future__ import annotations

import json

from tests.cli.test_cli import output_of, run


def test_flexllm() -> None:
    options = ["simulate", "flexllm", "--model", "Llama-3.1-8B", "--duration", "24"]
    found = json.loads(output_of(*options, "--rate", "4", "--rate", "20", "--json"))
    light, heavy = found["rows"]
    assert (light["rate_per_s"], heavy["rate_per_s"]) == (4.0, 20.0)
    assert (light["paper_finetuning_tokens_per_s"], light["of_first_rate"]) == (9400.0, 1.0)
    assert heavy["of_first_rate"] >= 0.8
    assert min(light["slo_attainment"], heavy["slo_attainment"]) >= 0.95
    assert heavy["report"]["output_throughput"] > 2 * light["report"]["output_throughput"]


def test_s_lora() -> None:
    lines = output_of("simulate", "s-lora", "--model", "S1", "--duration", "3").splitlines()
    assert lines[0].split()[:2] == ["setting", "adapters"]
    assert [line.split()[:2] for line in lines[1:]] == [
        ["S1", n] for n in ("5", "100", "1,000", "2,000")
    ]


def test_punica() -> None:
    found = json.loads(output_of("simulate", "punica", "--duration", "10", "--rate", "8", "--json"))
    first = found["minutes"][0]
    assert len(first["busy"]) == 16
    # Sixteen GPUs, and what comes needs few of them: the others stay idle.
    assert 1 <= sum(busy > 0 for busy in first["busy"]) <= 8
    assert max(first["batch"]) > 4


def test_what_does_not_go_together() -> None:
    for args in (
        ("flexllm", "--model", "S1"),
        ("punica", "--model", "S1"),
        ("punica", "--rate", "1", "--rate", "2"),
        ("nonsense",),
    ):
        result = run("simulate", *args)
        assert result.exit_code == 2
