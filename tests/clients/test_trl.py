"""TRL's AsyncGRPO trains on a CPU with `pcg serve` as its sampler, in place of vLLM."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.support.other_clients import CHECKPOINT, KEY, ROOT, client_program, run_client, served

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_trl_trains_with_this_server_as_its_sampler(tmp_path: Path) -> None:
    python = client_program("trl", "python")
    adapters = tmp_path / "run" / ".vllm_lora"
    adapters.mkdir(parents=True)
    options = [f"--lora-roots={adapters}", "--logprobs-mode=processed_logprobs"]
    log = tmp_path / "log"
    with served(log, options=options) as server:
        printed = run_client(
            [python, str(ROOT / "tests" / "clients" / "trl_async_grpo.py")],
            tmp_path,
            PCG_MODEL=str(CHECKPOINT),
            PCG_OUTPUT=str(tmp_path / "run"),
            PCG_URL=server.url.replace("http://", f"http://trl:{KEY}@"),
            OMP_NUM_THREADS="1",
        )
    done = json.loads([line for line in printed.splitlines() if line.startswith("{")][-1])
    assert done["steps"] == 3
    first = done["logs"][0]
    assert abs(first["ratio"] - 1) < 1e-5  # the trainer's log-probabilities are the sampler's
    assert first["sample/staleness_max"] == 0
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    calls = Counter((one["route"], one["status"]) for one in lines)
    assert calls["/v1/load_lora_adapter", 200] == calls["/pause", 200] == calls["/resume", 200] >= 4
    assert calls["/v1/unload_lora_adapter", 200] >= 1
    assert calls["/v1/completions", 200] > 10
    models = {one["model"] for one in lines if one["route"] == "/v1/completions"}
    assert {"trl-policy-v1", "trl-policy-v2"} <= models
