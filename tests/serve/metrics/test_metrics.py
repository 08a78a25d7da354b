"""Metrics: who may read them, the load report of a reply, and GET /status."""

import json
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pcg.keys import Keys
from pcg.runtime.metrics.events import EventLog
from pcg.runtime.metrics.status import EngineNumbers
from pcg.runtime.metrics.totals import Totals
from pcg.serve.adapters.catalog import Catalog
from pcg.serve.engine.engine_names import Owned
from pcg.serve.metrics.engine_metrics import ASKED, REPORT, load_headers
from tests.support import serving


def ask(service, path, key, **options):
    headers = {} if key is None else serving.headers_of(key)
    return serving.ask(service, "POST" if options else "GET", path, headers, **options)


@pytest.fixture(scope="module")
def keys():
    scopes = ("infer", "train", "admin", "metrics")
    return Keys([serving.key(scope, scope) for scope in scopes])


def test_a_key_for_inference_does_not_read_names_of_others(keys):
    with serving.service_of(keys=keys) as service:
        asked = {"model": "lora-0", "prompt": "abc", "max_tokens": 3, "ignore_eos": True}
        assert ask(service, "/v1/completions", "infer", json=asked).status_code == 200
        for key, status in (
            ("admin", 200),
            ("metrics", 200),
            ("infer", 403),
            ("train", 403),
            (None, 401),
        ):
            reply = ask(service, "/metrics", key)
            assert reply.status_code == status
            assert ("lora-0" in reply.text) is (status == 200)
        for path in ("/v1/models", "/status", "/version"):
            assert ask(service, path, "metrics").status_code == 403
        page = ask(service, "/metrics?name[]=up", "metrics")
        assert page.headers["x-request-id"].startswith("req-")
        assert page.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        found = {
            sample.name: sample.value
            for family in text_string_to_metric_families(page.text)
            for sample in family.samples
            if sample.labels == {"model_name": serving.MODEL, "engine": "0"}
        }
        assert found["vllm:generation_tokens_total"] == 3
        assert found["vllm:request_queue_time_seconds_count"] == 1


def test_the_operator_may_open_it_and_nothing_else(keys):
    with serving.service_of(keys=keys, metrics_without_key=True) as service:
        for key in (None, "infer", "metrics"):
            assert ask(service, "/metrics", key).status_code == 200
        assert ask(service, "/status", None).status_code == 401
        assert ask(service, "/metrics/", None).status_code in (401, 404)


BODIES = {
    "/v1/completions": {"prompt": [1, 2, 3], "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/v1/responses": {"input": "a", "max_output_tokens": 2},
    "/v1/embeddings": {"input": "a"},
}
STREAMED = [path for path in BODIES if path != "/v1/embeddings"]


@pytest.fixture(scope="module")
def service():
    keys = Keys(
        [
            serving.key("red", "infer"),
            serving.key("watch", "infer", "metrics"),
            serving.key("root", "infer", "admin"),
        ]
    )
    with serving.service_of(keys=keys) as service:
        yield service


def reply_to(service, path, key, asked, stream=False):
    body = {**BODIES[path], **({"stream": True} if stream else {})}
    reply = serving.post(service, path, body, {**serving.headers_of(key), ASKED: asked})
    assert reply.status_code == 200, reply.text
    return reply


def test_the_formats_are_orcas():
    numbers = EngineNumbers(2, 1, 4, 9, {}, pages=10, free_pages=6, adapters=0,
                            shares_prefixes=True, late={}, totals=Totals(EventLog()))  # fmt: skip
    text = "TEXT named_metrics.kv_cache_usage_perc=0.4, named_metrics.num_requests_waiting=3.0"
    assert load_headers("text", numbers) == {REPORT: text}
    kind, _, content = load_headers("JSON", numbers)[REPORT].partition(" ")
    expected = {"kv_cache_usage_perc": 0.4, "num_requests_waiting": 3.0}
    assert (kind, json.loads(content)) == ("JSON", {"named_metrics": expected})
    assert load_headers("BIN", numbers) == {}


@pytest.mark.parametrize("path", BODIES)
def test_replies_have_it_where_it_is_asked_for(service, path):
    assert (
        reply_to(service, path, "watch", "TEXT").headers[REPORT].startswith("TEXT named_metrics.")
    )
    assert REPORT not in reply_to(service, path, "watch", "").headers
    if path in STREAMED:
        reply = reply_to(service, path, "root", "JSON", stream=True)
        assert reply.headers[REPORT].startswith('JSON {"named_metrics":')


def test_it_is_for_those_who_may_read_metrics(service, monkeypatch):
    """Its numbers tell what other tenants do."""
    path = "/v1/completions"
    assert REPORT not in reply_to(service, path, "red", "TEXT").headers
    with monkeypatch.context() as change:
        change.setattr(service, "keys", Keys([serving.key("red", "infer")]))
        assert REPORT in reply_to(service, path, "red", "TEXT").headers
    open_to_all = replace(service.options, metrics_without_key=True)
    monkeypatch.setattr(service, "options", open_to_all)
    assert REPORT in reply_to(service, path, "red", "TEXT").headers


@pytest.fixture(scope="module")
def busy():
    keys = Keys(
        [
            serving.key("red", "infer"),
            serving.key("blue", "infer"),
            serving.key("root", "infer", "admin"),
            serving.key("watch", "infer", "metrics"),
        ]
    )
    executor = serving.make_executor(adapters=3)
    with serving.service_of(executor, keys, ttft_slo_ms=60_000.0) as service:
        yield service


def status_of(service, key):
    """The status as a key sees it; None for the key of a server that has one."""
    headers = serving.HEADERS if key is None else serving.headers_of(key)

    reply = serving.ask(service, "GET", "/status", headers)
    assert reply.status_code == 200
    found = reply.json()
    return found


def test_it_has_what_the_engine_did(busy):
    for model in ("lora-0", serving.MODEL):
        body = {"model": model, "prompt": "ab", "max_tokens": 5, "ignore_eos": True}
        reply = serving.post(busy, "/v1/completions", body, serving.headers_of("red"))
        assert reply.status_code == 200
    found = status_of(busy, "root")
    assert (found["model"], found["key"], found["state"]) == (serving.MODEL, "root", "running")
    assert found["max_model_len"] == 128
    whole = found["engine"]
    assert whole["tokens"]["generated"] == 10
    assert whole["requests"] == {"running": 0, "waiting": 0}
    ttft = whole["latencies"]["ttft"]
    assert sum(ttft["counts"]) == ttft["requests"] == ttft["kept"] == 2
    assert ttft["promised_s"] == 60.0
    assert len(ttft["counts"]) == len(ttft["bounds"]) + 1
    assert sum(whole["latencies"]["itl"]["counts"]) == 8
    assert found["memory_bytes"]["weights"] > 0
    assert "adapter_copies" in found["memory_bytes"]
    (first, *_) = found["adapters"]
    assert (first["name"], first["method"], first["is_resident"]) == ("lora-0", "LoRA", True)


def test_numbers_of_all_tenants_are_not_for_one_of_them(busy):
    assert status_of(busy, "red")["engine"] is None
    assert status_of(busy, "watch")["engine"] == status_of(busy, "root")["engine"]
    with serving.service_of() as alone:
        assert status_of(alone, None)["engine"]["requests"] == {"running": 0, "waiting": 0}


def test_names_of_other_tenants_are_not_in_it(busy, monkeypatch):
    owners = {"lora-0": Owned("red", "mine"), "lora-1": Owned("blue", "mine")}
    monkeypatch.setattr(busy.part(Catalog), "owned", lambda name: owners.get(name, Owned("", name)))
    streams = [
        busy.client.engine.submit(
            [1, 2], name, tenant=tenant, request_id=tenant, max_new_tokens=100, ignore_eos=True
        )
        for name, tenant in (("lora-0", "red"), ("lora-1", "blue"))
    ]
    for stream in streams:
        next(stream)
    for key, tenants in (("red", {"red"}), ("blue", {"blue"}), ("root", {"red", "blue"})):
        found = status_of(busy, key)
        adapters = {(one["tenant"], one["name"]) for one in found["adapters"]}
        assert adapters == {("", "lora-2"), *((tenant, "mine") for tenant in tenants)}
        assert {one["tenant"] for one in found["running"]} <= tenants
        assert str({"red", "blue"} - tenants).strip("{}'") not in str(found) or key == "root"
    for stream in streams:
        stream.cancel()
