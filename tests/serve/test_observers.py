"""The access log and traces: what they say of a request, and what they never say."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
import threading
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Event
from urllib.parse import quote, urlsplit

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from pcg.errors import ServeError
from pcg.keys import Keys
from pcg.serve.http.middleware import Record
from pcg.serve.observers import AccessLog
from tests.support import serving
from tests.support.step_gate import StepGate
from tests.support.waiting import until

SECRET = "my-secret-prompt"


def logged(path, act, **options):
    """The lines that are written while a client acts."""
    keys = Keys([serving.key("ci", "infer", tenant="research")])

    async def run(service):
        async with serving.client_of(service, serving.headers_of("ci")) as client:
            await act(client)
            left = asyncio.all_tasks() - {asyncio.current_task()}
            # Lines of requests whose ends come behind their replies.
            await asyncio.gather(*left, return_exceptions=True)

    with serving.service_of(keys=keys, access_log=str(path), **options) as service:
        asyncio.run(run(service))
    text = path.read_text(encoding="ascii")
    assert re.fullmatch(r"[\x20-\x7e\n]*", text)
    assert SECRET not in text
    assert "key-of-ci" not in text
    return [json.loads(line) for line in text.splitlines()]


def test_a_line_says_who_asked_what_and_which_version_answered(tmp_path):
    body = {"model": "lora-0", "prompt": SECRET, "max_tokens": 5, "ignore_eos": True}

    async def act(client):
        await client.post("/v1/completions", json=body, headers={"x-request-id": "mine"})
        await client.post("/v1/completions", json={**body, "stream": True, "n": 2})
        await client.get("/v1/models")
        await client.get("/health")

    whole, streamed, models = logged(tmp_path / "log", act)
    assert whole["request_id"] == "mine"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", whole["time"])
    expected = {
        "method": "POST", "route": "/v1/completions", "status": 200, "is_whole": True,
        "key": "ci", "tenant": "research", "model": "lora-0", "adapter_version": 2,
        "output_tokens": 5, "finish_reasons": ["length"],
    }  # fmt: skip
    assert expected.items() <= whole.items()
    assert whole["prompt_tokens"] > 0
    assert 0 <= whole["queued_s"] <= whole["first_token_s"] <= whole["duration_s"]
    assert streamed["finish_reasons"] == ["length", "length"]
    assert streamed["output_tokens"] == 10
    assert (models["route"], models["status"]) == ("/v1/models", 200)
    assert "model" not in models


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_logged_with_what_it_had(tmp_path, stream):
    path = tmp_path / "log"
    with serving.on_a_port(access_log=str(path)) as served, served.client() as client:
        engine = served.service.client.engine.engine
        gate = StepGate(engine)
        gate.let(8)  # the text of a first token may wait for the next
        asked = {"prompt": "Hello", "max_tokens": 100, "temperature": 0, "ignore_eos": True}
        body = {"model": serving.MODEL, "stream": stream, **asked}
        if stream:
            with client.stream("POST", "/v1/completions", json=body) as reply:
                next(reply.iter_lines())
        else:
            where = urlsplit(served.url)
            connection = HTTPConnection(where.hostname or "", where.port)
            headers = {**serving.HEADERS, "content-type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            until(lambda: bool(engine.requests.by_id))
            connection.close()
        until(lambda: not served.server.server_state.tasks)
    (line,) = [json.loads(line) for line in path.read_text().splitlines()]
    assert (line["status"], line["is_whole"]) == (499, False)
    assert line["finish_reasons"] == ["cancelled"]
    assert line["output_tokens"] < 100


@pytest.mark.parametrize(
    "hostile", ['x"}\n{"status": 200', "\x1b[2J\x9b31m", "\u2028 \u202e \x7f", "é" * 5000]
)
def test_nobody_writes_a_line_or_speaks_to_a_terminal(tmp_path, hostile):
    async def act(client):
        await client.post("/v1/completions", json={"model": hostile, "prompt": SECRET})
        await client.get(f"/{quote(hostile)}")
        await client.get("/v1/models", params={"key": "in-a-query"})
        await client.get("/v1/models", headers={"authorization": "Bearer nobody"})

    lines = logged(tmp_path / "log", act)
    assert [line["status"] for line in lines] == [404, 404, 200, 401]
    assert max(len(json.dumps(line)) for line in lines) < 4000
    assert "in-a-query" not in str(lines)
    assert lines[-1]["key"] is None


def test_lines_that_nobody_takes_are_dropped_and_counted(tmp_path, monkeypatch):
    monkeypatch.setattr("pcg.serve.observers._MOST_WAITING", 2)
    log = AccessLog(str(tmp_path / "log"))
    emit, is_open = log._emit, Event()

    def slow(line):
        is_open.wait(60)
        return emit(line)

    monkeypatch.setattr(log, "_emit", slow)
    record = Record({"type": "http", "method": "GET", "path": "/x"})
    for _ in range(50):
        log.observe(record)
    is_open.set()
    log.close()
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    dropped = [line["dropped_lines"] for line in lines if "dropped_lines" in line]
    assert sum(dropped) > 40
    assert sum(dropped) + len(lines) - len(dropped) == 50


def test_a_file_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(ServeError, match="cannot be written"):
        AccessLog(str(tmp_path / "no" / "log"))


def test_a_file_that_cannot_be_written_any_more_is_told_once(tmp_path, caplog, capfd):
    """A full disk, or a folder that is gone; lines are counted, and come again when it is there."""
    record = Record({"type": "http", "method": "GET", "path": "/", "headers": []})
    folder, away = tmp_path / "logs", tmp_path / "away"
    folder.mkdir()
    log = AccessLog(str(folder / "log"))
    log.observe(record)
    until(lambda: (folder / "log").read_text().count("\n") == 1)
    folder.rename(away)
    for _ in range(3):
        log.observe(record)
    until(lambda: log._dropped == 3)
    away.rename(folder)
    log.observe(record)
    log.close()
    *written, dropped = map(json.loads, (folder / "log").read_text().splitlines())
    assert [one["method"] for one in written] == ["GET", "GET"]
    assert dropped["dropped_lines"] == 3
    full = AccessLog("/dev/full")
    for _ in range(3):
        full.observe(record)
    full.close()
    said = [one.message for one in caplog.records]
    assert len(said) == 2, said
    assert "No such file" in said[0]
    assert "No space left" in said[1]
    assert capfd.readouterr().err == ""


def test_a_pipe_that_nobody_reads_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ServeError, match=r"the access log .*pipe' cannot be written"):
        AccessLog(str(tmp_path / "pipe"))


TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector(HTTPServer):
    """A collector on a free port, which keeps the spans that it gets."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans = []
        self.endpoint = f"http://127.0.0.1:{self.server_port}/v1/traces"


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self):
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

    def log_message(self, *_):
        """Log nothing."""


@pytest.fixture
def collector():
    with Collector() as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def attributes(span):
    found = {}
    for one in span.attributes:
        kind = one.value.WhichOneof("value")
        value = getattr(one.value, kind)
        found[one.key] = (
            [each.string_value for each in value.values] if kind == "array_value" else value
        )
    return found


def test_a_request_is_a_span_in_its_clients_trace(collector):
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
