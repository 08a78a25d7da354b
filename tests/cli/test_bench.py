"""`pcg bench serve` and `pcg simulate`: what they serve, print, draw and refuse."""

import json
import shutil
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from cli.application import app
from tests.support import tiny_llama
from tests.support.command_line import ROOT, output_of, run

SMALL = (
    "--request-rate", "inf", "--num-prompts", "6", "--adapters", "3", "--ranks", "2,4",
    "--input-len", "3-9", "--output-len", "5", "--kv-cache-gib", "0.05",
)  # fmt: skip


def bench(*args):
    return CliRunner().invoke(app, ["bench", "serve", *map(str, args)])


def report_of(*args):
    result = bench(*args, "--json")
    assert result.exit_code == 0, result.output + repr(result.exception)
    found = json.loads(result.stdout)
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_llama.save(tmp_path_factory.mktemp("models") / "tiny")


def test_help_has_an_example():
    text = bench("--help").stdout
    assert "pcg bench serve" in text[text.index("Example:") :]


def test_tables_and_plot(model, tmp_path):
    plot = tmp_path / "latencies.svg"
    result = bench(model, *SMALL, "--tenants", "2", "--ttft-slo-ms", "60000", "--plot", plot)
    assert result.exit_code == 0, result.output + repr(result.exception)
    lines = {line.split("  ")[0].strip(): line.split() for line in result.stdout.splitlines()}
    assert lines["requests"][-1] == "6"
    assert "time to first token" in lines
    assert "SLO attainment" in lines
    assert "Jain index of tenants" in lines
    assert "<svg" in plot.read_text("utf-8")


def test_numbers_have_the_names_of_vllm(model):
    found = report_of(model, *SMALL)
    assert found["completed"] == 6
    assert found["total_output_tokens"] == 30
    assert 18 <= found["total_input_tokens"] <= 54
    assert found["output_throughput"] == pytest.approx(30 / found["duration"])
    assert found["mean_ttft_ms"] > 0
    assert found["slo_attainment"] is None
    assert found["finetuning_steps"] == 0
    again = report_of(model, *SMALL)
    assert again["total_input_tokens"] == found["total_input_tokens"]


def test_prompts_that_begin_alike_are_found_in_the_cache(model):
    shared = ("--random-prefix-len", "32", "--adapters", "0")
    found = report_of(model, *SMALL, *shared)
    assert found["total_cached_tokens"] == 5 * 32
    assert found["prefix_cache_hit_rate"] == 5 * 32 / found["total_input_tokens"]
    without = report_of(model, *SMALL, *shared, "--no-enable-prefix-caching")
    assert without["total_input_tokens"] == found["total_input_tokens"]
    assert without["total_cached_tokens"] == 0


def test_a_configuration_is_enough(model, tmp_path):
    shutil.copy(model / "config.json", tmp_path / "config.json")
    refused = bench(tmp_path, *SMALL)
    assert refused.exit_code == 1
    assert "has no weights" in refused.stderr
    assert report_of(tmp_path, *SMALL, "--load-format", "dummy")["completed"] == 6


@pytest.mark.parametrize(
    "sharing",
    [
        pytest.param(("co-serving",), marks=pytest.mark.slow),
        ("temporal", "--inference-frequency", "2"),
        ("spatial", "--finetuning-share", "0.7"),
    ],
    ids=["co-serving", "temporal", "spatial"],
)
def test_finetuning_beside(model, sharing):
    found = report_of(
        model, *SMALL, "--finetune", "random", "--finetune-len", "8", "--finetune-rank", "2",
        "--output-len", "40", "--tpot-slo-ms", "60000", "--sharing", *sharing,
    )  # fmt: skip
    assert found["completed"] == 6
    assert found["finetuning_steps"] > 0
    assert found["finetuning_tokens"] == {"finetuned": 16 * found["finetuning_steps"]}
    assert found["slo_attainment"] == 1.0


def test_one_of_the_two_alone(model):
    trained = report_of(
        model, *SMALL, "--finetune", "random", "--finetune-len", "8", "--sharing", "finetuning-only"
    )
    assert trained["submitted"] == 0
    assert trained["finetuning_steps"] > 0
    assert trained["duration"] >= 1.0
    assert report_of(model, *SMALL, "--sharing", "inference-only")["completed"] == 6


def test_a_file_is_trained_on(tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "def main(): return 1"}\n' * 8)
    sharing = ("--sharing", "spatial", "--output-len", "60")
    found = report_of("examples/checkpoint", *SMALL, "--finetune", data, *sharing)
    assert found["finetuning_steps"] > 0


def test_a_trace_is_replayed(model, tmp_path):
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"time_s": 0.0, "adapter": "sql", "prompt_tokens": 5, "output_tokens": 3},
        {"time_s": 0.1, "prompt_tokens": 2, "output_tokens": 4, "tenant": "a"},
        {"time_s": 0.2, "prompt_tokens": 2, "output_tokens": 4},
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = report_of(model, "--trace", trace, "--kv-cache-gib", "0.05", "--num-prompts", "2")
    assert found["completed"] == 2
    assert found["adapters"] == 1
    assert found["total_output_tokens"] == 7
    assert found["tenant_tokens"] == {"-": 8, "a": 6}
    csv = tmp_path / "trace.csv"
    csv.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.0000000,9,3\n2023-11-16 18:17:04.0000000,4,2\n"
    )
    found = report_of(model, "--trace", csv, "--request-rate", "20", "--kv-cache-gib", "0.05")
    assert found["completed"] == 2
    assert found["total_output_tokens"] == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--arrivals", "daily"), "none of gamma, constant, bursty, s-lora"),
        (("--popularity", "fame"), "none of zipf, distinct, uniform"),
        (("--sharing", "half"), "none of co-serving, temporal"),
        (("--load-format", "pt"), "none of auto, dummy"),
        (("--sharing", "finetuning-only"), "give --finetune"),
        (("--sharing", "inference-only", "--finetune", "random"), "does not go with --finetune"),
        (("--ranks", "8,x"), "'x'; use a whole number"),
        (("--input-len", "long"), "a range as 8-512"),
        (("--burstiness", "0"), "a finite number above 0"),
        (("--duration", "3", "--num-prompts", "3"), "does not go with --num-prompts"),
        (("--arrivals", "s-lora"), "give --duration"),
        (("--request-rate", "inf", "--duration", "1"), "it has no end"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_usage(model, options, message):
    result = bench(model, *options)
    assert result.exit_code == 2
    plain = " ".join(result.stderr.replace("│", " ").split())
    assert message in plain


def test_policies_outside_pcg(model):
    result = bench(model, "--policy", "collections:Policy")
    assert result.exit_code == 1
    assert "'collections' has no attribute 'Policy'" in result.stderr
    assert "or correct the name" in result.stderr


def test_requests_longer_than_the_model(model):
    result = bench(model, "--num-prompts", "2", "--input-len", "9000", "--request-rate", "inf")
    assert result.exit_code == 1
    assert "positions; use shorter lengths" in result.stderr


@pytest.mark.dist
@pytest.mark.slow
def test_ranks_serve_a_workload_together(model):
    """Beside a job; the first one alone reports."""
    job = ("--finetune", "random", "--finetune-len", "16")
    command = [sys.executable, "-m", "cli", "bench", "serve", str(model), *SMALL, *job]
    done = subprocess.run(
        [*command, "--tp", "2", "--json"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert (found["tp"], found["completed"], found["total_output_tokens"]) == (2, 6, 30)


@pytest.mark.slow
def test_flexllm():
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


@pytest.mark.slow
def test_flexllm_shared_otherwise():
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


def test_s_lora():
    lines = output_of("simulate", "s-lora", "--model", "S1", "--duration", "3").splitlines()
    assert lines[0].split()[:2] == ["setting", "adapters"]
    assert [line.split()[:2] for line in lines[1:]] == [
        ["S1", n] for n in ("5", "100", "1,000", "2,000")
    ]


def test_punica():
    found = json.loads(output_of("simulate", "punica", "--duration", "10", "--rate", "8", "--json"))
    first = found["minutes"][0]
    assert len(first["busy"]) == 16
    # Sixteen GPUs, and what comes needs few of them: the others stay idle.
    assert 1 <= sum(busy > 0 for busy in first["busy"]) <= 8
    assert max(first["batch"]) > 4


def test_what_does_not_go_together():
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
