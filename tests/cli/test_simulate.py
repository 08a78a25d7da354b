"""`pcg simulate`: seconds of each experiment, as tables and as JSON."""

from __future__ import annotations

import json

import pytest

from tests.support.command_line import output_of, run


def test_flexllm() -> None:
    options = ["simulate", "flexllm", "--model", "Llama-3.1-8B", "--duration", "12", "--seeds", "2"]
    found = json.loads(output_of(*options, "--rate", "4", "--rate", "20", "--json"))
    light, heavy = found["rows"]
    assert (light["rate_per_s"], heavy["rate_per_s"]) == (4.0, 20.0)
    # What comes is what was asked for, however calm the seed's seconds are.
    assert light["came_per_s"] == pytest.approx(4.0)
    assert heavy["came_per_s"] == pytest.approx(20.0)
    assert (light["paper_finetuning_tokens_per_s"], light["of_first_rate"]) == (9400.0, 1.0)
    assert heavy["of_first_rate"] >= 0.8
    assert min(light["slo_attainment_least"], heavy["slo_attainment_least"]) >= 0.95
    assert min(light["gap_attainment"], heavy["gap_attainment"]) >= 0.99
    assert heavy["output_tokens_per_s"] > 2 * light["output_tokens_per_s"]
    tokens = [report["finetuning_throughput"] for report in heavy["reports"]]
    assert heavy["finetuning_tokens_per_s"] == pytest.approx(sum(tokens) / 2)
    assert heavy["finetuning_tokens_per_s_std"] == pytest.approx(
        abs(tokens[0] - tokens[1]) / 2**0.5
    )


def test_flexllm_shared_otherwise() -> None:
    rules = ("co-serving", "temporal-64", "spatial-50", "separate-75", "inference-only")
    options = ["--model", "Llama-3.1-8B", "--duration", "8", "--rate", "20", "--json"]
    chosen = [word for rule in rules for word in ("--sharing", rule)]
    rows = json.loads(output_of("simulate", "flexllm", *options, *chosen))["rows"]
    found = dict(zip(rules, rows, strict=True))
    assert [row["sharing"] for row in rows] == list(rules)
    trained = {rule: row["finetuning_tokens_per_s"] for rule, row in found.items()}
    assert trained["inference-only"] == 0.0
    # One of four pipelines trains, and all of its time: less than four that train in what is left.
    assert 0 < trained["separate-75"] < trained["co-serving"] / 2
    assert found["separate-75"]["paper_finetuning_tokens_per_s"] == 3800.0
    assert found["spatial-50"]["of_co_serving"] == pytest.approx(
        trained["spatial-50"] / trained["co-serving"]
    )
    assert trained["temporal-64"] > 0
    assert trained["spatial-50"] > 0


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
        ("punica", "--seeds", "2"),
        ("s-lora", "--sharing", "co-serving"),
        ("flexllm", "--sharing", "temporal"),
        ("nonsense",),
    ):
        result = run("simulate", *args)
        assert result.exit_code == 2
