"""An engine in a process of its own: what it answers, and what is left when one of both is gone."""

import asyncio
import json
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from pcg.errors import EngineError
from pcg.runtime.engine.commands import Taken
from pcg.runtime.metrics.status import EngineState
from pcg.serve.engine.options import ServeOptions
from pcg.serve.engine.process import process_client
from tests.support import serving, tinker_client
from tests.support.server_process import LONG, WIDE, Load, load_broken, running
from tests.support.waiting import until

NAMES = ("lora-0", "lora-1")


@pytest.fixture(scope="module")
def executor():
    return serving.make_executor(adapters=2)


@pytest.fixture(scope="module")
def root(executor, tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    for name in NAMES:
        executor.save_adapter(name, root / name)
    return root


@pytest.fixture(scope="module")
def served(root):
    modules = [f"--lora-modules={name}={root / name}" for name in NAMES]
    options = ["--no-enable-prefix-caching", "--max-queue", "64", "--max-num-seqs", "64"]
    with running(*modules, f"--lora-roots={root}", *options) as served:
        yield served


def text_of_stream(client, body):
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as reply:
        events = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert events[-1] == "[DONE]"
    return "".join(json.loads(one)["choices"][0]["text"] for one in events[:-1])


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.0, "seed": 7}])
def test_streams_have_the_text_of_the_library(served, executor, sampling):
    with served.client() as client:
        for adapter in (None, *NAMES):
            body = {"model": adapter or serving.MODEL, "prompt": "Hello, how", "max_tokens": 12}
            (expected,) = executor.generate(["Hello, how"], adapter, max_new_tokens=12, **sampling)
            assert text_of_stream(client, {**body, **sampling}) == expected.text


BODIES = [
    {"n": 2, "best_of": 3, "seed": 1, "temperature": 1.0, "logprobs": 2},
    {"prompt_logprobs": 1, "echo": True, "logprobs": 1, "prompt": ["Hello", "the quick"], "n": 2},
    {"guided_regex": "[0-9]{3}", "temperature": 0},
    {"guided_json": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    {"bad_words": ["the"], "logit_bias": {"5": 3.0}, "stop": ["q"], "min_p": 0.1, "seed": 2},
    {"model": "lora-0", "return_token_ids": True, "stop_token_ids": [7], "temperature": 0},
    {"prompt": "Hello", "truncate_prompt_tokens": -1, "temperature": 0},
    {"guided_regex": "[0-9"},
    {"prompt": [10**9]},
    {"prompt": [1] * 127, "max_tokens": 20},
    {"prompt": ["a", ""]},
    {"logprobs": 10**6},
    {"top_p": 7.0},
    {"temperature": "hot"},
    {"model": "none"},
    {"n": 128},
]


def near(expected):
    """The same value, whose numbers are compared as rounded: steps may batch prompts otherwise."""
    if isinstance(expected, float):
        return pytest.approx(expected, abs=1e-4)
    if isinstance(expected, dict):
        return {name: near(value) for name, value in expected.items()}
    if isinstance(expected, list | tuple):
        return type(expected)(map(near, expected))
    return expected


def test_replies_and_errors_are_those_of_one_process(served, executor):
    """All that a reply has, but for its id, time and version, and the texts of errors."""

    def comparable(reply):
        found = reply.json()
        for name in ("id", "created", "system_fingerprint"):
            found.pop(name, None)
        return reply.status_code, found

    async def ask():
        options = {"max_queue": 64, "enable_prefix_caching": False}
        with serving.service_of(executor, **options) as service:
            async with serving.client_of(service) as client:
                return [comparable(await client.post("/v1/completions", json=b)) for b in asked]

    common = {"model": serving.MODEL, "prompt": "Hello, how", "max_tokens": 8, "temperature": 0}
    asked = [{**common, **body} for body in BODIES]
    expected = asyncio.run(ask())
    assert {status for status, _ in expected} == {200, 400, 404}
    with served.client() as client:
        for body, wanted in zip(asked, expected, strict=True):
            found = comparable(client.post("/v1/completions", json=body))
            assert found == near(wanted), body


def test_numbers_and_characters_that_no_message_has(served):
    with served.client() as client:
        for field, value in (("top_k", 10**30), ("cache_salt", "\ud800"), ("prompt", [10**30])):
            body = {"model": serving.MODEL, "prompt": "Hello", "max_tokens": 2, field: value}
            headers = {"content-type": "application/json"}
            reply = client.post("/v1/completions", content=json.dumps(body), headers=headers)
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)


def test_embeddings_are_those_of_the_library(served, executor):
    with served.client() as client:
        body = {"model": "lora-1", "input": ["Hello", "the quick"], "normalize": False}
        found = client.post("/v1/embeddings", json=body).json()["data"]
    expected = executor.embed(["Hello", "the quick"], "lora-1").tolist()
    for one, wanted in zip(found, expected, strict=True):
        assert one["embedding"] == pytest.approx(wanted, abs=1e-5)


def numbers(client):
    return client.get("/status").json()["engine"]


def test_a_client_that_leaves_is_served_no_further(served):
    """Its pages are free again; a client that was too slow to leave before the end tries again."""

    def is_left_early():
        before = numbers(client)["tokens"]["generated"]
        with client.stream("POST", "/v1/completions", json=WIDE) as reply:
            next(reply.iter_lines())
        until(lambda: numbers(client)["requests"]["running"] == 0)
        after = numbers(client)
        assert after["free_pages"] == after["pages"]
        return bool(after["tokens"]["generated"] - before < 64 * 100)

    with served.client() as client:
        until(is_left_early)


def test_adapters_come_go_and_are_replaced(served, root):
    """Requests that are here when an adapter is replaced or unloaded end on it."""
    with served.client() as client, served.client() as other:

        def load(**fields):
            body = {"lora_name": "mine", "lora_path": "lora-0", **fields}
            return client.post("/v1/load_lora_adapter", json=body)

        def fingerprint():
            body = {"model": "mine", "prompt": "Hello", "max_tokens": 1}
            return client.post("/v1/completions", json=body).json().get("system_fingerprint")

        first = load()
        assert first.headers["x-adapter-version"] == "1"
        assert load().status_code == 400
        body = {**LONG, "model": "mine", "n": 32, "stream": True}
        with other.stream("POST", "/v1/completions", json=body) as reply:
            lines = reply.iter_lines()
            next(lines)
            replaced = load(lora_path="lora-1", load_inplace=True)
            assert replaced.headers["x-adapter-version"] == "2"
            assert replaced.headers["x-adapter-digest"] != first.headers["x-adapter-digest"]
            assert fingerprint() == "mine@2"
            assert load(expected_version=1).status_code == 409
            assert load(lora_path="nowhere", load_inplace=True).status_code == 404
            gone = client.post("/v1/unload_lora_adapter", json={"lora_name": "mine"})
            assert gone.status_code == 200
            assert client.post("/v1/completions", json=body).status_code == 404
            events = [line.removeprefix("data: ") for line in lines if line]
        assert events[-1] == "[DONE]"
        ended = [json.loads(one) for one in events[:-1]]
        assert {one["system_fingerprint"] for one in ended} == {"mine@1"}
        assert sum(one["choices"][0]["finish_reason"] == "length" for one in ended) == 32
        assert load().headers["x-adapter-version"] == "3"
        assert fingerprint() == "mine@3"


def test_metrics_and_status_are_those_of_the_engine(served):
    with served.client() as client:
        client.post("/v1/completions", json={**LONG, "model": "lora-0", "max_tokens": 3})
        page = client.get("/metrics").text
        status = client.get("/status").json()
    assert 'vllm:num_requests_running{engine="0",model_name="tiny"} 0.0' in page
    assert 'pcg:adapter_requests_total{adapter="lora-0"' in page
    assert 'running_lora_adapters="lora-0' in page
    sizes = dict(re.findall(r"^(\w*process_resident_memory_bytes) (\S+)$", page, re.MULTILINE))
    assert sizes.keys() == {
        "process_resident_memory_bytes",
        "pcg_engine_process_resident_memory_bytes",
    }
    assert all(float(size) > 2**20 for size in sizes.values())
    assert {one["name"] for one in status["adapters"]} >= set(NAMES)
    first = next(one for one in status["adapters"] if one["name"] == "lora-0")
    assert (first["version"], first["method"], first["is_resident"]) == (1, "LoRA", True)


def test_a_page_has_all_of_the_request_that_ended_before_it(served):
    """Also where the engine tells of its numbers unasked, as others ask for pages."""

    def generated(client):
        series = r"^vllm:generation_tokens_total\S* (\S+)$"
        (found,) = re.findall(series, client.get("/metrics").text, re.MULTILINE)
        return float(found)

    with served.client() as client:
        before = generated(client)
        for expected in range(3, 18, 3):
            client.post("/v1/completions", json={**LONG, "max_tokens": 3})
            found = [generated(client) - before]
            while found[-1] < expected:  # a page is kept for a moment
                found.append(generated(client) - before)
            assert found[-1] == expected


@pytest.mark.slow
def test_a_killed_engine_ends_requests_and_the_server(tmp_path):
    with (
        running("--data-dir", str(tmp_path)) as server,
        server.client() as client,
        ThreadPoolExecutor(2) as thread,
    ):
        (engine,), load = server.engine_pids, Load()
        load.begin(server, 4)
        os.kill(engine, signal.SIGSTOP)
        promise = client.post("/tinker/api/v1/asample", json=tinker_client.sample([1])).json()
        asked = {"request_id": promise["request_id"]}
        waits = thread.submit(client.post, "/tinker/api/v1/retrieve_future", json=asked)
        whole = thread.submit(client.post, "/v1/completions", json=LONG)
        os.kill(engine, signal.SIGKILL)
        load.join()
        assert server.process.wait(60) == 1
        assert "the engine's process ended by SIGKILL" in server.errors()
        if whole.exception() is None:  # else it came when nobody listened any more
            assert whole.result().status_code == 503
        if waits.exception() is None:
            assert waits.result().json()["error"]["code"] == "ending"
    (_, _, _, lines) = load.lines
    assert lines[-2:] == ["data: [DONE]", ""]
    error = json.loads(lines[-4].removeprefix("data: "))["error"]
    assert (error["type"], error["code"]) == ("server_error", "engine_ended")


@pytest.mark.slow
def test_an_engine_that_breaks_is_not_served_any_more():
    options = ServeOptions(**serving.OPTIONS)
    with process_client(load_broken, options, tenants=1) as client:
        assert client.health().state is EngineState.RUNNING
        stream = client.submit(client.request("Hello", None, {"max_new_tokens": 4}))
        while client.ended is None:
            with suppress(EngineError):
                client.wait(client.call(Taken()))
        with pytest.raises(EngineError, match="broken on purpose"):
            stream.wait(0)
        assert client.health().state is EngineState.ENDED
        with pytest.raises(EngineError):
            client.submit(client.request("Hello", None, {}))
