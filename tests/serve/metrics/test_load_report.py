"""The load report with a reply: its formats, its numbers, and who gets it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import httpx2
import pytest

from pcg.keys import Keys
from pcg.runtime.metrics.events import EventLog
from pcg.runtime.metrics.status import EngineNumbers
from pcg.runtime.metrics.totals import Totals
from pcg.serve.http.service import Service
from pcg.serve.metrics.engine_metrics import ASKED, REPORT, load_headers
from tests.support import serving

BODIES = {
    "/v1/completions": {"prompt": [1, 2, 3], "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/v1/responses": {"input": "a", "max_output_tokens": 2},
    "/v1/embeddings": {"input": "a"},
}
STREAMED = [path for path in BODIES if path != "/v1/embeddings"]


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    keys = Keys(
        [
            serving.key("red", "infer"),
            serving.key("watch", "infer", "metrics"),
            serving.key("root", "infer", "admin"),
        ]
    )
    with serving.service_of(keys=keys) as service:
        yield service


def ask(service: Service, path: str, key: str, asked: str, stream: bool = False) -> httpx2.Response:
    body = {**BODIES[path], **({"stream": True} if stream else {})}
    reply = serving.post(service, path, body, {**serving.headers_of(key), ASKED: asked})
    assert reply.status_code == 200, reply.text
    return reply


def test_the_formats_are_orcas() -> None:
    numbers = EngineNumbers(2, 1, 4, 9, {}, pages=10, free_pages=6, adapters=0,
                            shares_prefixes=True, late={}, totals=Totals(EventLog()))  # fmt: skip
    text = "TEXT named_metrics.kv_cache_usage_perc=0.4, named_metrics.num_requests_waiting=3.0"
    assert load_headers("text", numbers) == {REPORT: text}
    kind, _, content = load_headers("JSON", numbers)[REPORT].partition(" ")
    expected = {"kv_cache_usage_perc": 0.4, "num_requests_waiting": 3.0}
    assert (kind, json.loads(content)) == ("JSON", {"named_metrics": expected})
    assert load_headers("BIN", numbers) == {}


@pytest.mark.parametrize("path", BODIES)
def test_replies_have_it_where_it_is_asked_for(service: Service, path: str) -> None:
    assert ask(service, path, "watch", "TEXT").headers[REPORT].startswith("TEXT named_metrics.")
    assert REPORT not in ask(service, path, "watch", "").headers
    if path in STREAMED:
        reply = ask(service, path, "root", "JSON", stream=True)
        assert reply.headers[REPORT].startswith('JSON {"named_metrics":')


def test_it_is_for_those_who_may_read_metrics(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its numbers tell what other tenants do."""
    path = "/v1/completions"
    assert REPORT not in ask(service, path, "red", "TEXT").headers
    with monkeypatch.context() as change:
        change.setattr(service, "keys", Keys([serving.key("red", "infer")]))
        assert REPORT in ask(service, path, "red", "TEXT").headers
    open_to_all = replace(service.options, metrics_without_key=True)
    monkeypatch.setattr(service, "options", open_to_all)
    assert REPORT in ask(service, path, "red", "TEXT").headers
