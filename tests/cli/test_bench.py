"""`pcg bench serve`: what it serves, prints, draws and refuses."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cli.application import app
from tests.support import tiny_llama
from tests.support.command_line import ROOT

SMALL = (
    "--request-rate", "inf", "--num-prompts", "6", "--adapters", "3", "--ranks", "2,4",
    "--input-len", "3-9", "--output-len", "5", "--kv-cache-gib", "0.05",
)  # fmt: skip


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(app, ["bench", "serve", *map(str, args)])


def report_of(*args: str | Path) -> dict[str, Any]:
    result = run(*args, "--json")
    assert result.exit_code == 0, result.output + repr(result.exception)
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.save(tmp_path_factory.mktemp("models") / "tiny")


def test_help_has_an_example() -> None:
    text = run("--help").stdout
    assert "pcg bench serve" in text[text.index("Example:") :]


def test_tables_and_plot(model: Path, tmp_path: Path) -> None:
    plot = tmp_path / "latencies.svg"
    result = run(model, *SMALL, "--tenants", "2", "--ttft-slo-ms", "60000", "--plot", plot)
    assert result.exit_code == 0, result.output + repr(result.exception)
    lines = {line.split("  ")[0].strip(): line.split() for line in result.stdout.splitlines()}
    assert lines["requests"][-1] == "6"
    assert "time to first token" in lines
    assert "SLO attainment" in lines
    assert "Jain index of tenants" in lines
    assert "<svg" in plot.read_text("utf-8")


def test_numbers_have_the_names_of_vllm(model: Path) -> None:
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


def test_prompts_that_begin_alike_are_found_in_the_cache(model: Path) -> None:
    shared = ("--random-prefix-len", "32", "--adapters", "0")
    found = report_of(model, *SMALL, *shared)
    assert found["total_cached_tokens"] == 5 * 32
    assert found["prefix_cache_hit_rate"] == 5 * 32 / found["total_input_tokens"]
    without = report_of(model, *SMALL, *shared, "--no-enable-prefix-caching")
    assert without["total_input_tokens"] == found["total_input_tokens"]
    assert without["total_cached_tokens"] == 0


def test_a_configuration_is_enough(model: Path, tmp_path: Path) -> None:
    shutil.copy(model / "config.json", tmp_path / "config.json")
    refused = run(tmp_path, *SMALL)
    assert refused.exit_code == 1
    assert "has no weights" in refused.stderr
    assert report_of(tmp_path, *SMALL, "--load-format", "dummy")["completed"] == 6


@pytest.mark.parametrize(
    "sharing",
    [
        ("co-serving",),
        ("temporal", "--inference-frequency", "2"),
        ("spatial", "--finetuning-share", "0.7"),
    ],
    ids=lambda sharing: sharing[0],
)
def test_finetuning_beside(model: Path, sharing: tuple[str, ...]) -> None:
    found = report_of(
        model, *SMALL, "--finetune", "random", "--finetune-len", "8", "--finetune-rank", "2",
        "--output-len", "40", "--tpot-slo-ms", "60000", "--sharing", *sharing,
    )  # fmt: skip
    assert found["completed"] == 6
    assert found["finetuning_steps"] > 0
    assert found["finetuning_tokens"] == {"finetuned": 16 * found["finetuning_steps"]}
    assert found["slo_attainment"] == 1.0


def test_one_of_the_two_alone(model: Path) -> None:
    trained = report_of(
        model, *SMALL, "--finetune", "random", "--finetune-len", "8", "--sharing", "finetuning-only"
    )
    assert trained["submitted"] == 0
    assert trained["finetuning_steps"] > 0
    assert trained["duration"] >= 1.0
    assert report_of(model, *SMALL, "--sharing", "inference-only")["completed"] == 6


def test_a_file_is_trained_on(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "def main(): return 1"}\n' * 8)
    sharing = ("--sharing", "spatial", "--output-len", "60")
    found = report_of("examples/checkpoint", *SMALL, "--finetune", data, *sharing)
    assert found["finetuning_steps"] > 0


def test_a_trace_is_replayed(model: Path, tmp_path: Path) -> None:
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
        (("--policy", "last"), "none of fair-share, fcfs"),
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
def test_wrong_usage(model: Path, options: tuple[str, ...], message: str) -> None:
    result = run(model, *options)
    assert result.exit_code == 2
    plain = " ".join(result.stderr.replace("│", " ").split())
    assert message in plain


def test_requests_longer_than_the_model(model: Path) -> None:
    result = run(model, "--num-prompts", "2", "--input-len", "9000", "--request-rate", "inf")
    assert result.exit_code == 1
    assert "positions; use shorter lengths" in result.stderr


@pytest.mark.dist
@pytest.mark.slow
def test_ranks_serve_a_workload_together(model: Path) -> None:
    """Beside a job; the first one alone reports."""
    job = ("--finetune", "random", "--finetune-len", "16")
    command = [sys.executable, "-m", "cli", "bench", "serve", str(model), *SMALL, *job]
    done = subprocess.run(
        [*command, "--tp", "2", "--json"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert (found["tp"], found["completed"], found["total_output_tokens"]) == (2, 6, 30)
