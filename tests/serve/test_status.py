"""GET /status: what a key may see, and that it agrees with the engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pcg.keys import Keys
from pcg.serve.adapters.catalog import Catalog
from pcg.serve.engine.engine_names import Owned
from pcg.serve.http.service import Service
from tests.support import serving


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
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


def status_of(service: Service, key: str | None) -> dict[str, Any]:
    """The status as a key sees it; None for the key of a server that has one."""
    headers = serving.HEADERS if key is None else serving.headers_of(key)

    reply = serving.ask(service, "GET", "/status", headers)
    assert reply.status_code == 200
    found: dict[str, Any] = reply.json()
    return found


def test_it_has_what_the_engine_did(service: Service) -> None:
    for model in ("lora-0", serving.MODEL):
        body = {"model": model, "prompt": "ab", "max_tokens": 5, "ignore_eos": True}
        reply = serving.post(service, "/v1/completions", body, serving.headers_of("red"))
        assert reply.status_code == 200
    found = status_of(service, "root")
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


def test_numbers_of_all_tenants_are_not_for_one_of_them(service: Service) -> None:
    assert status_of(service, "red")["engine"] is None
    assert status_of(service, "watch")["engine"] == status_of(service, "root")["engine"]
    with serving.service_of() as alone:
        assert status_of(alone, None)["engine"]["requests"] == {"running": 0, "waiting": 0}


def test_names_of_other_tenants_are_not_in_it(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    owners = {"lora-0": Owned("red", "mine"), "lora-1": Owned("blue", "mine")}
    monkeypatch.setattr(
        service.part(Catalog), "owned", lambda name: owners.get(name, Owned("", name))
    )
    streams = [
        service.client.engine.submit(
            [1, 2], name, tenant=tenant, request_id=tenant, max_new_tokens=100, ignore_eos=True
        )
        for name, tenant in (("lora-0", "red"), ("lora-1", "blue"))
    ]
    for stream in streams:
        next(stream)
    for key, tenants in (("red", {"red"}), ("blue", {"blue"}), ("root", {"red", "blue"})):
        found = status_of(service, key)
        adapters = {(one["tenant"], one["name"]) for one in found["adapters"]}
        assert adapters == {("", "lora-2"), *((tenant, "mine") for tenant in tenants)}
        assert {one["tenant"] for one in found["running"]} <= tenants
        assert str({"red", "blue"} - tenants).strip("{}'") not in str(found) or key == "root"
    for stream in streams:
        stream.cancel()
