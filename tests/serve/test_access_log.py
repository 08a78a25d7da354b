"""The access log: what a line says, what it never says, and that nobody can write one."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path
from threading import Event
from typing import Any
from urllib.parse import quote, urlsplit

import httpx2
import pytest

from pcg.errors import ServeError
from pcg.keys import Keys
from pcg.serve.http.middleware import Record
from pcg.serve.observers import AccessLog
from tests.support import serving
from tests.support.step_gate import StepGate
from tests.support.waiting import until

SECRET = "my-secret-prompt"


def logged(path: Path, act: Callable[[httpx2.AsyncClient], Any], **options: Any) -> list[Any]:
    """The lines that are written while a client acts."""
    keys = Keys([serving.key("ci", "infer", tenant="research")])

    async def run(service: Any) -> None:
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


def test_a_line_says_who_asked_what_and_which_version_answered(tmp_path: Path) -> None:
    body = {"model": "lora-0", "prompt": SECRET, "max_tokens": 5, "ignore_eos": True}

    async def act(client: httpx2.AsyncClient) -> None:
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
def test_a_client_that_leaves_is_logged_with_what_it_had(tmp_path: Path, stream: bool) -> None:
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
def test_nobody_writes_a_line_or_speaks_to_a_terminal(tmp_path: Path, hostile: str) -> None:
    async def act(client: httpx2.AsyncClient) -> None:
        await client.post("/v1/completions", json={"model": hostile, "prompt": SECRET})
        await client.get(f"/{quote(hostile)}")
        await client.get("/v1/models", params={"key": "in-a-query"})
        await client.get("/v1/models", headers={"authorization": "Bearer nobody"})

    lines = logged(tmp_path / "log", act)
    assert [line["status"] for line in lines] == [404, 404, 200, 401]
    assert max(len(json.dumps(line)) for line in lines) < 4000
    assert "in-a-query" not in str(lines)
    assert lines[-1]["key"] is None


def test_lines_that_nobody_takes_are_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pcg.serve.observers._MOST_WAITING", 2)
    log = AccessLog(str(tmp_path / "log"))
    emit, is_open = log._emit, Event()

    def slow(line: str) -> bool:
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


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ServeError, match="cannot be written"):
        AccessLog(str(tmp_path / "no" / "log"))


def test_a_file_that_cannot_be_written_any_more_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
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


def test_a_pipe_that_nobody_reads_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ServeError, match=r"the access log .*pipe' cannot be written"):
        AccessLog(str(tmp_path / "pipe"))
