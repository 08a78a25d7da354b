"""Loading adapters: what clients are told, who waits for a place, and vLLM's control endpoints."""

import asyncio
import base64
import json
import logging
from concurrent.futures import Future
from pathlib import Path

import pytest

from pcg.errors import AdapterError, AdapterNotFoundError, EngineError
from pcg.files import SUMS, read_bytes
from pcg.keys import Keys
from pcg.peft.adapter_files import CONFIG
from pcg.runtime.engine.commands import AddAdapter, Taken
from pcg.serve.adapters import routes
from pcg.serve.adapters.loader import Loader, Origin, with_client_path
from pcg.serve.http.errors import ApiError
from tests.support import serving


@pytest.mark.parametrize("length", [10, 280, 290, 298, 299, 300, 301, 400])
def test_a_message_has_nothing_of_the_servers_folders(length):
    directory = Path("/server/" + "/".join(["deep"] * 80))
    directory = Path(str(directory)[: length - 1] + "x")
    with pytest.raises(AdapterError) as refused:
        read_bytes(directory / CONFIG, AdapterError)
    said = with_client_path(f"{refused.value}; {directory} has none", directory, "sql")
    assert "server" not in said
    assert said.startswith("sql")
    assert said.endswith("; sql has none")


def said(caplog):
    return [one.getMessage() for one in caplog.records if one.name == "pcg.adapters"]


def test_an_adapter_of_another_base_is_loaded_with_a_warning(tmp_path, caplog):
    executor = serving.make_executor()
    executor.save_adapter("lora-0", tmp_path / "sql")
    (tmp_path / "sql" / SUMS).unlink()  # its files are edited
    file = tmp_path / "sql" / CONFIG
    config = json.loads(file.read_text())
    name = config["base_model_name_or_path"]
    with caplog.at_level(logging.WARNING, "pcg.adapters"):
        for same in (name, f"somebody/{name.upper()}", f"/models/{name}/", "", None):
            file.write_text(json.dumps({**config, "base_model_name_or_path": same}))
            executor.add_adapter("sql", tmp_path / "sql", replace=True)
        assert said(caplog) == []
        file.write_text(json.dumps({**config, "base_model_name_or_path": "meta-llama/Other-1B"}))
        executor.add_adapter("sql", tmp_path / "sql", replace=True)
    (message,) = said(caplog)
    assert "'sql' was trained on the base 'meta-llama/Other-1B', and this one is" in message


FOUND = Origin("somewhere", 0, is_found=True)
BY_NAME = Origin("somewhere", 0)


class Client:
    """An engine whose loads end when a test says so."""

    def __init__(self):
        self.adapters = {}
        self.loads = {}
        self.order = []

    def call(self, command):
        future = Future()
        if isinstance(command, AddAdapter):
            self.order.append(command.name)
            self.loads[command.name] = future
        elif self.adapters.pop(command.name, None) is None:
            future.set_exception(AdapterNotFoundError(command.name))
        else:
            future.set_result(None)
        return future

    def end(self, name, error=None):
        if error is None:
            self.adapters[name] = name
            self.loads.pop(name).set_result(name)
        else:
            self.loads.pop(name).set_exception(error)


async def settled():
    for _ in range(20):
        await asyncio.sleep(0)


def load(loader, name, tenant="", origin=FOUND):
    return asyncio.create_task(loader.load(name, Path("x"), origin, tenant=tenant))


def test_tenants_have_places_in_turn():
    """One that asks for a hundred adapters keeps another, who asks later, waiting for one."""

    async def run():
        client = Client()
        loader = Loader(client, 2)
        tasks = [load(loader, f"flood {i}", "flood") for i in range(100)]
        await settled()
        tasks += [load(loader, f"other {i}", "other") for i in range(3)]
        await settled()
        while client.loads:
            assert len(client.adapters) + len(client.loads) <= 2
            client.end(next(iter(client.loads)))
            await settled()
        for task in tasks:
            assert task.result() in client.order
        return client.order

    order = asyncio.run(run())
    assert [place for place, name in enumerate(order) if name.startswith("other")] == [3, 5, 7]
    assert [n for n in order if n.startswith("flood")] == [f"flood {i}" for i in range(100)]


def test_nobody_waits_for_what_stays():
    async def run():
        client = Client()
        loader = Loader(client, 1)
        kept, late = load(loader, "kept", origin=BY_NAME), load(loader, "late")
        await settled()
        assert not late.done()  # what comes may fail
        client.end("kept")
        await settled()
        with pytest.raises(ApiError, match="--max-cpu-loras is 1"):
            await late
        again = load(loader, "again")
        with pytest.raises(ApiError, match="--max-cpu-loras is 1"):
            await again
        await loader.unload("kept")
        after = load(loader, "after")
        await settled()
        client.end("after")
        assert await after == "after"
        await kept

    asyncio.run(run())


def test_places_of_those_who_left_and_failed_go_to_others():
    async def run():
        client = Client()
        loader = Loader(client, 1)
        first, left, second = (load(loader, name) for name in ("first", "left", "second"))
        await settled()
        left.cancel()
        client.end("first", EngineError("no"))
        await settled()
        assert list(client.loads) == ["second"]
        third = load(loader, "third")
        await settled()
        second.cancel()  # its load goes on in the engine, and its place is free
        await settled()
        client.end("third")
        assert await third == "third"
        with pytest.raises(EngineError):
            await first

    asyncio.run(run())


KEYS = Keys([serving.key("all"), serving.key("user", "infer")])


@pytest.fixture(scope="module")
def executor():
    return serving.make_executor(adapters=1)


@pytest.fixture(scope="module")
def root(tmp_path_factory, executor):
    root = tmp_path_factory.mktemp("run") / ".vllm_lora"
    executor.save_adapter("lora-0", root / "trl-policy-v1")
    return root


@pytest.fixture(scope="module")
def service(executor, root):
    options = {"lora_roots": (str(root),), "logprobs_mode": "processed_logprobs"}
    with serving.service_of(executor, KEYS, **options) as service:
        yield service


def basic(password):
    token = base64.b64encode(f"pcg:{password}".encode()).decode()
    return {"authorization": f"Basic {token}"}


def test_a_key_may_be_the_password_of_the_address(service):
    assert serving.ask(service, "GET", "/version", basic("key-of-all")).status_code == 200
    damaged = [{"authorization": f"Basic {text}"} for text in ("???", "/w==", "")]
    for headers in (basic("wrong"), basic(""), *damaged):
        assert serving.ask(service, "GET", "/version", headers).status_code == 401


def test_what_trl_asks_of_a_server(service, root):
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


def test_a_pause_keeps_what_is_asked_until_the_end(service):
    headers = serving.headers_of("all")
    body = {"model": serving.MODEL, "prompt": "ab", "max_tokens": 3, "ignore_eos": True}

    async def run():
        async with serving.client_of(service, headers) as client:
            assert (await client.post("/pause?mode=keep")).status_code == 200
            asked = asyncio.create_task(client.post("/v1/completions", json=body))
            for _ in range(20):  # each is between two steps, if there were any
                await asyncio.wrap_future(service.client.call(Taken()))
            assert not asked.done()
            assert (await client.post("/resume")).status_code == 200
            return (await asked).status_code

    assert asyncio.run(run()) == 200


def test_a_pause_that_nobody_ends_ends_by_itself(service, monkeypatch):
    monkeypatch.setattr(routes, "PAUSE_S", 0.01)
    headers = serving.headers_of("all")
    assert serving.ask(service, "POST", "/pause?mode=keep", headers).status_code == 200
    body = {"model": serving.MODEL, "prompt": "ab", "max_tokens": 3}
    assert serving.post(service, "/v1/completions", body, headers).status_code == 200


def test_a_pause_is_the_operators_and_of_one_mode(service):
    user, admin = serving.headers_of("user"), serving.headers_of("all")
    for path in ("/pause?mode=keep", "/resume"):
        assert serving.ask(service, "POST", path, user).status_code == 403
    for path in ("/pause", "/pause?mode=abort", "/pause?mode=wait"):
        assert serving.ask(service, "POST", path, admin).status_code == 400
    assert serving.ask(service, "GET", "/server_info?config_format=text", user).status_code == 400


def test_a_server_without_roots_promises_no_adapters_and_drains_paused():
    with serving.service_of(serving.make_executor(adapters=0), KEYS) as service:
        info = serving.ask(service, "GET", "/server_info", serving.headers_of("user")).json()
        assert info["vllm_config"]["lora_config"] is None
        engine = service.client.engine
        engine.pause(3600.0).result()
        stream = engine.submit([1, 2], max_new_tokens=2)
        for _ in range(20):
            engine.run(lambda: None)
        assert engine.engine.submitted == 1
        assert engine.numbers().totals.output_tokens == 0
        engine.drain().result(60)
        assert len(stream.wait().token_ids) == 2
