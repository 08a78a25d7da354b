"""Traces: what a collector gets of a request, by OpenTelemetry's own protocol and messages."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support import serving

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET = "my-secret-prompt"


class Collector(HTTPServer):
    """A collector on a free port, which keeps the spans that it gets."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[Any] = []
        self.endpoint = f"http://127.0.0.1:{self.server_port}/v1/traces"


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        assert SECRET.encode() not in body
        found = ExportTraceServiceRequest.FromString(body)
        for resource in found.resource_spans:
            for scope in resource.scope_spans:
                self.server.spans += scope.spans
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def attributes(span: Any) -> dict[str, Any]:
    found = {}
    for one in span.attributes:
        kind = one.value.WhichOneof("value")
        value = getattr(one.value, kind)
        found[one.key] = (
            [each.string_value for each in value.values] if kind == "array_value" else value
        )
    return found


def test_a_request_is_a_span_in_its_clients_trace(collector: Collector) -> None:
    body = {
        "model": "lora-0", "prompt": SECRET, "max_tokens": 6, "temperature": 0.5, "seed": 3,
        "ignore_eos": True, "stream": True,
    }  # fmt: skip
    with (
        serving.on_a_port(otlp_traces_endpoint=collector.endpoint) as served,
        served.client() as client,
    ):
        sent = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        client.post("/v1/completions", json=body, headers=sent)
        client.post("/v1/completions", json={**body, "model": "none"})
        client.get("/health")
    spans = {span.name: span for span in collector.spans}
    assert set(spans) == {
        "text_completion lora-0", "POST /v1/completions", "wait", "prefill", "decode"
    }  # fmt: skip
    span = spans["text_completion lora-0"]
    assert span.trace_id.hex() == TRACE
    assert span.parent_span_id.hex() == PARENT
    assert span.kind == span.SPAN_KIND_SERVER
    found = attributes(span)
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "pcg",
        "gen_ai.request.model": "lora-0",
        "gen_ai.response.model": "lora-0@2",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.request.max_tokens": 6,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 3,
        "gen_ai.usage.output_tokens": 6,
        "http.response.status_code": 200,
        "http.route": "/v1/completions",
        "pcg.tenant": "default",
    }
    assert expected.items() <= found.items()
    assert found["gen_ai.usage.input_tokens"] > 0
    assert 0 < found["gen_ai.latency.time_to_first_token"] < found["gen_ai.latency.e2e"]
    phases = [spans[name] for name in ("wait", "prefill", "decode")]
    for phase in phases:
        assert phase.trace_id == span.trace_id
        assert phase.parent_span_id == span.span_id
        assert span.start_time_unix_nano <= phase.start_time_unix_nano
        assert phase.start_time_unix_nano < phase.end_time_unix_nano
    assert phases[0].end_time_unix_nano == phases[1].start_time_unix_nano
    failed = attributes(spans["POST /v1/completions"])
    assert failed["error.type"] == "404"
    assert "gen_ai.request.model" not in failed
