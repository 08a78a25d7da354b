"""`pcg serve` is killed while a client trains, and started again: nothing is lost or done twice."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support import serving, tinker_client
from tests.support.server_process import Running, running

UPDATES = 24


def passed(model: str, seq: int) -> dict[str, Any]:
    tokens = [(seq * 7 + i) % 50 + 1 for i in range(12)]
    datum = {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": tokens[:-1]}]},
        "loss_fn_inputs": {
            "target_tokens": {"data": tokens[1:], "dtype": "int64", "shape": [11]},
            "weights": {"data": [1.0] * 11, "dtype": "float32", "shape": [11]},
        },
    }
    asked = {"data": [datum], "loss_fn": "cross_entropy"}
    return {"model_id": model, "seq_id": seq, "forward_backward_input": asked}


def ask(raw: httpx2.Client, model: str, update: int) -> list[Any]:
    """Ask for an update; returns its two promises."""
    step = {"model_id": model, "seq_id": 2 * update + 2, "adam_params": {"learning_rate": 1e-2}}
    asked = (("forward_backward", passed(model, 2 * update + 1)), ("optim_step", step))
    return [raw.post(path, json=body).raise_for_status().json() for path, body in asked]


def made(raw: httpx2.Client) -> str:
    session = raw.post("create_session", json={"tags": []}).json()["session_id"]
    body = {
        "session_id": session, "model_seq_id": 0, "base_model": serving.MODEL,
        "lora_config": {"rank": 4, "seed": 1},
    }  # fmt: skip
    promise = raw.post("create_model", json=body).raise_for_status().json()
    assert "error" not in tinker_client.result(raw, promise)
    return str(promise["model_id"])


def client_of(server: Running) -> httpx2.Client:
    headers = {"x-api-key": serving.KEY}
    return httpx2.Client(base_url=f"{server.url}/tinker/api/v1/", headers=headers, timeout=60)


@pytest.mark.slow
def test_a_killed_server_goes_on_where_it_was(tmp_path: Path) -> None:
    chance = random.Random(0)
    own = ["--data-dir", str(tmp_path)]
    promises: list[Any] = []
    results: dict[str, Any] = {}
    model, is_over, kills = "", False, 0
    while not is_over:
        with running(*own) as server, client_of(server) as raw:
            model = model or made(raw)
            for promise in promises:  # all that was acknowledged is there, as it was
                found = tinker_client.result(raw, promise)
                assert results.setdefault(promise["request_id"], found) == found
            until = min(UPDATES, len(promises) // 2 + chance.randint(5, 9))
            for update in range(len(promises) // 2, until):
                promises += ask(raw, model, update)
                if chance.random() < 0.6:
                    last = promises[-1]
                    results[last["request_id"]] = tinker_client.result(raw, last)
            is_over = len(promises) == 2 * UPDATES
            if not is_over:
                server.process.kill()
                server.process.wait(60)
                kills += 1
                continue
            there = [tinker_client.result(raw, one) for one in promises]
            again = made(raw)
            straight = [
                tinker_client.result(raw, one)
                for update in range(UPDATES)
                for one in ask(raw, again, update)
            ]
    assert kills > 1
    for ours, expected in zip(there, straight, strict=True):
        assert ours["metrics"] == pytest.approx(expected["metrics"], rel=1e-5)
