"""vLLM's endpoints for trainers: TRL's calls in its order, and a pause that keeps requests."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from pathlib import Path

import pytest

from pcg.keys import Keys
from pcg.runtime.engine.commands import Taken
from pcg.runtime.executor import Executor
from pcg.serve.adapters import routes
from pcg.serve.http.service import Service
from tests.support import serving

KEYS = Keys([serving.key("all"), serving.key("user", "infer")])


@pytest.fixture(scope="module")
def executor() -> Executor:
    return serving.make_executor(adapters=1)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, executor: Executor) -> Path:
    root = tmp_path_factory.mktemp("run") / ".vllm_lora"
    executor.save_adapter("lora-0", root / "trl-policy-v1")
    return root


@pytest.fixture(scope="module")
def service(executor: Executor, root: Path) -> Iterator[Service]:
    options = {"lora_roots": (str(root),), "logprobs_mode": "processed_logprobs"}
    with serving.service_of(executor, KEYS, **options) as service:
        yield service


def basic(password: str) -> dict[str, str]:
    token = base64.b64encode(f"pcg:{password}".encode()).decode()
    return {"authorization": f"Basic {token}"}


def test_a_key_may_be_the_password_of_the_address(service: Service) -> None:
    assert serving.ask(service, "GET", "/version", basic("key-of-all")).status_code == 200
    damaged = [{"authorization": f"Basic {text}"} for text in ("???", "/w==", "")]
    for headers in (basic("wrong"), basic(""), *damaged):
        assert serving.ask(service, "GET", "/version", headers).status_code == 401


def test_what_trl_asks_of_a_server(service: Service, root: Path) -> None:
    admin = basic("key-of-all")
    info = serving.ask(service, "GET", "/server_info?config_format=json", admin).json()
    found = info["vllm_config"]
    assert found["model_config"]["dtype"] == "torch.float32"
    assert found["parallel_config"]["data_parallel_size"] == 1
    assert found["lora_config"]["max_loras"] >= 2
    assert found["lora_config"]["max_lora_rank"] == 256
    models = serving.ask(service, "GET", "/v1/models", admin).json()
    assert models["data"][0]["max_model_len"] == 128
    for _ in range(2):  # a pause may come twice
        reply = serving.ask(service, "POST", "/pause?mode=keep", admin)
        assert reply.json() == {"status": "paused"}
    name = "trl-policy-v1"
    load = {"lora_name": name, "lora_path": str(root / name), "load_inplace": False}
    assert serving.post(service, "/v1/load_lora_adapter", load, admin).status_code == 200
    assert serving.ask(service, "POST", "/resume", admin).json() == {"status": "resumed"}
    body = {
        "model": name, "prompt": [5, 8, 13], "max_tokens": 4, "temperature": 0.7, "top_p": 1.0,
        "top_k": -1, "repetition_penalty": 1.0, "n": 1, "return_token_ids": True, "logprobs": 0,
        "seed": 2**63 - 1, "min_p": 0.0,
    }  # fmt: skip
    reply = serving.post(service, "/v1/completions", body, admin)
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) == 4
    unload = {"lora_name": name}
    assert serving.post(service, "/v1/unload_lora_adapter", unload, admin).status_code == 200


def test_a_pause_keeps_what_is_asked_until_the_end(service: Service) -> None:
    headers = serving.headers_of("all")
    body = {"model": serving.MODEL, "prompt": "ab", "max_tokens": 3, "ignore_eos": True}

    async def run() -> int:
        async with serving.client_of(service, headers) as client:
            assert (await client.post("/pause?mode=keep")).status_code == 200
            asked = asyncio.create_task(client.post("/v1/completions", json=body))
            for _ in range(20):  # each is between two steps, if there were any
                await asyncio.wrap_future(service.client.call(Taken()))
            assert not asked.done()
            assert (await client.post("/resume")).status_code == 200
            return (await asked).status_code

    assert asyncio.run(run()) == 200


def test_a_pause_that_nobody_ends_ends_by_itself(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "PAUSE_S", 0.01)
    headers = serving.headers_of("all")
    assert serving.ask(service, "POST", "/pause?mode=keep", headers).status_code == 200
    body = {"model": serving.MODEL, "prompt": "ab", "max_tokens": 3}
    assert serving.post(service, "/v1/completions", body, headers).status_code == 200


def test_a_pause_is_the_operators_and_of_one_mode(service: Service) -> None:
    user, admin = serving.headers_of("user"), serving.headers_of("all")
    for path in ("/pause?mode=keep", "/resume"):
        assert serving.ask(service, "POST", path, user).status_code == 403
    for path in ("/pause", "/pause?mode=abort", "/pause?mode=wait"):
        assert serving.ask(service, "POST", path, admin).status_code == 400
    assert serving.ask(service, "GET", "/server_info?config_format=text", user).status_code == 400


def test_a_server_without_roots_promises_no_adapters_and_drains_paused() -> None:
    with serving.service_of(serving.make_executor(adapters=0), KEYS) as service:
        info = serving.ask(service, "GET", "/server_info", serving.headers_of("user")).json()
        assert info["vllm_config"]["lora_config"] is None
        engine = service.client.engine  # type: ignore[attr-defined]
        engine.pause(3600.0).result()
        stream = engine.submit([1, 2], max_new_tokens=2)
        for _ in range(20):
            engine.run(lambda: None)
        assert engine.engine.submitted == 1
        assert engine.numbers().totals.output_tokens == 0
        engine.drain().result(60)
        assert len(stream.wait().token_ids) == 2
