"""guidellm's load succeeds on every endpoint, and schemathesis finds nothing beyond the schema."""

import json
from functools import partial
from pathlib import Path

import pytest

from tests.support.other_clients import BASE, CHECKPOINT, KEY, client_program, run_client, served
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

REQUESTS, PROMPT, OUTPUT = 12, 24, 16


def run(server, home, endpoint, model, profile):
    """The benchmarks that it reports."""
    backend = {
        "kind": "openai_http",
        "target": server.url,
        "api_key": KEY,
        "request_format": endpoint,
        "model": model,
    }
    command = [client_program("guidellm", "guidellm"), "run", "--disable-console"]
    command += ["--backend", ",".join(f"{name}={value}" for name, value in backend.items())]
    command += ["--profile", profile, "--constraint", f"kind=max_requests,count={REQUESTS}"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={CHECKPOINT}"]
    data = f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={OUTPUT}"
    command += ["--data", data, "--output", f"kind=json,path={home / 'report.json'}"]
    run_client(command, home, OMP_NUM_THREADS="1")
    return json.loads((home / "report.json").read_text())["benchmarks"]


def answered(log, endpoint, model):
    """The requests that the server answered to their end, by its access log.

    guidellm's own count may lack the last one on a machine that is busy.
    """
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    whole = [one for one in lines if (one["route"], one["model"]) == (endpoint, model)]
    assert all(one["status"] == 200 and one["is_whole"] for one in whole)
    return len(whole)


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_all_requests_of_a_run_succeed(tmp_path, endpoint):
    with served(tmp_path / "log", ("typed",)) as server:
        for model, profile in ((BASE, "kind=synchronous"), ("typed", "kind=concurrent,streams=8")):
            (benchmark,) = run(server, tmp_path, endpoint, model, profile)
            totals = benchmark["metrics"]["request_totals"]
            assert totals["errored"] == totals["incomplete"] == 0
            assert totals["successful"] > 0
            whole = partial(answered, tmp_path / "log", endpoint, model)
            until(lambda whole=whole: whole() >= REQUESTS)  # a thread writes the log
            assert whole() == REQUESTS
            for request in benchmark["requests"]["successful"]:
                assert request["output_metrics"]["text_tokens"] == OUTPUT


LENGTH = 128
"""The most tokens of a prompt and its output: without a bound of its own, a request fills them."""
EXAMPLES = 40
SEEDS = (1, 2)


def test_every_endpoint_keeps_to_its_schema(tmp_path):
    """All checks but `positive_data_acceptance`: rules among fields, as that a prompt and its

    output fit into the model or that best_of is at least n, do not stand in a schema.
    """
    program = client_program("schemathesis", "st")
    bound = ("--max-model-len", str(LENGTH), "--data-dir", str(tmp_path / "data"))
    with served(tmp_path / "log", ("typed",), bound) as server:
        for seed in SEEDS:
            command = [program, "run", f"{server.url}/openapi.json", "--seed", str(seed)]
            command += ["-H", f"Authorization: Bearer {KEY}", "--generation-database", "none"]
            command += ["--max-examples", str(EXAMPLES), "--no-color", "--warnings", "off"]
            command += ["--checks", "all", "--exclude-checks", "positive_data_acceptance"]
            run_client(
                command,
                tmp_path,
                timeout_s=900,
                PYTHONPATH=str(Path(__file__).parent),
                SCHEMATHESIS_HOOKS="schemathesis_hooks",
                PCG_MODEL=BASE,
            )
    assert "Traceback" not in (tmp_path / "log").read_text()
