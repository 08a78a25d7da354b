"""GET /metrics: who may read it, and that what it says is of the requests that came."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pcg.keys import Keys
from pcg.serve.app import create_app
from pcg.serve.http.service import Service
from tests.support import serving


def ask(service: Service, path: str, key: str | None, **options: Any) -> httpx2.Response:
    headers = {} if key is None else serving.headers_of(key)
    return serving.ask(service, "POST" if options else "GET", path, headers, **options)


@pytest.fixture(scope="module")
def keys() -> Keys:
    scopes = ("infer", "train", "admin", "metrics")
    return Keys([serving.key(scope, scope) for scope in scopes])


def test_a_key_for_inference_does_not_read_names_of_others(keys: Keys) -> None:
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


def test_the_operator_may_open_it_and_nothing_else(keys: Keys) -> None:
    with serving.service_of(keys=keys, metrics_without_key=True) as service:
        for key in (None, "infer", "metrics"):
            assert ask(service, "/metrics", key).status_code == 200
        assert ask(service, "/status", None).status_code == 401
        assert ask(service, "/metrics/", None).status_code in (401, 404)


def test_a_scrape_costs_the_framework_nothing_and_other_methods_are_refused(keys: Keys) -> None:
    with serving.service_of(keys=keys, key_requests=1) as service:
        app = create_app(service)

        async def fail(*_: Any) -> None:
            raise AssertionError("a scrape came to the routes")

        setattr(app, "router", fail)  # noqa: B010

        async def scrape() -> list[int]:
            transport = httpx2.ASGITransport(app=app)
            async with httpx2.AsyncClient(transport=transport, base_url="http://a") as client:
                headers = serving.headers_of("metrics")
                replies = [client.get("/metrics", headers=headers) for _ in range(3)]
                return [one.status_code for one in await asyncio.gather(*replies)]

        assert asyncio.run(scrape()) == [200, 200, 200]
        assert ask(service, "/metrics", "metrics", json={}).status_code == 405
