"""guidellm's load: all requests of a short run succeed, on every endpoint that it knows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.other_clients import (
    BASE,
    CHECKPOINT,
    KEY,
    Served,
    client_program,
    run_client,
    served,
)

pytestmark = pytest.mark.slow

REQUESTS, PROMPT, OUTPUT = 12, 24, 16


def run(server: Served, home: Path, endpoint: str, model: str, profile: str) -> list[dict]:
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


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_all_requests_of_a_run_succeed(tmp_path: Path, endpoint: str) -> None:
    with served(tmp_path / "log", ("typed",)) as server:
        for model, profile in ((BASE, "kind=synchronous"), ("typed", "kind=concurrent,streams=8")):
            (benchmark,) = run(server, tmp_path, endpoint, model, profile)
            totals = benchmark["metrics"]["request_totals"]
            assert totals["successful"] == REQUESTS
            assert totals["errored"] == totals["incomplete"] == 0
            for request in benchmark["requests"]["successful"]:
                assert request["output_metrics"]["text_tokens"] == OUTPUT
