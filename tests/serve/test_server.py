"""The server on a port: from the first request to the drain."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import pytest

from pcg.errors import PcgError, ServeError
from pcg.serve.listening import check_certificate, listen, url_of
from pcg.serve.options import ServeOptions
from pcg.serve.server import serve
from tests.support import serving
from tests.support.step_gate import StepGate
from tests.support.waiting import until


def test_a_server_over_loopback() -> None:
    with serving.on_a_port() as served, served.client() as client:
        assert client.get("/health").json() == {"status": "running"}
        body = {"model": serving.MODEL, "prompt": "Hello", "max_tokens": 4, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as reply:
            lines = list(reply.iter_lines())
        assert lines[-2:] == ["data: [DONE]", ""]


def test_a_drain_gives_up_what_does_not_end_in_time() -> None:
    """A stream ends by an error, and a reply that was not begun is one."""
    body = {
        "model": serving.MODEL,
        "prompt": [1, 2, 3],
        "max_tokens": 100,
        "ignore_eos": True,
        "n": 64,
    }
    with (
        serving.on_a_port(shutdown_timeout_s=0.05) as served,
        served.client() as client,
        served.client() as other,
        ThreadPoolExecutor(1) as thread,
    ):
        gate = StepGate(served.service.client.engine.engine)
        gate.let(2)
        begun = {**body, "stream": True}
        with client.stream("POST", "/v1/completions", json=begun) as reply:
            lines = reply.iter_lines()
            next(lines)
            whole = thread.submit(other.post, "/v1/completions", json=body)
            numbers = served.service.client.engine.numbers
            until(lambda: numbers().waiting + numbers().running >= 65)
            served.server.drain()
            *_, error, _, done, _ = lines
        assert done == "data: [DONE]"
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "timed_out"
        assert whole.result(60).status_code == 503


def test_a_certificate_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ServeError, match=r"none\.pem cannot be used for https"):
        check_certificate(tmp_path / "none.pem", None)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lora_modules": ("a=nowhere",)}, r"--lora-modules a=nowhere: no adapter_config\.json is"),
        ({"lora_modules": ("a=x", "a=y")}, "'a' twice"),
        ({"lora_modules": ('{"name": "a"}',)}, "use NAME=PATH, or"),
        ({"lora_roots": ("nowhere",)}, "nowhere is no folder"),
        ({"chat_template": Path("none.jinja")}, r"none\.jinja cannot be read"),
        ({"ssl_certfile": Path("none.pem")}, r"none\.pem cannot be used"),
        ({"port": 1, "host": "no such host."}, "is no address"),
    ],
)
def test_what_is_not_there_is_known_before_the_model_is_loaded(
    options: dict[str, Any], text: str
) -> None:
    def engine(*_: object) -> NoReturn:
        raise AssertionError("the model was loaded")

    with pytest.raises(PcgError, match=text):
        serve(ServeOptions(**{**serving.OPTIONS, **options}), engine, print)


def test_a_port_that_is_taken() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ServeError, match=f"port {port} of 127.0.0.1 is in use"):
            listen("127.0.0.1", port)
    with pytest.raises(ServeError, match="is no address"):
        listen("no such host.", 0)


def test_urls() -> None:
    with listen("127.0.0.1", 0) as bound:
        port = bound.getsockname()[1]
        assert url_of(bound, is_secure=False) == f"http://127.0.0.1:{port}"
    if socket.has_ipv6:
        with listen("::1", 0) as bound:
            port = bound.getsockname()[1]
            assert url_of(bound, is_secure=True) == f"https://[::1]:{port}"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("port", -1),
        ("max_num_seqs", 0),
        ("kv_cache_gib", 0.0),
        ("max_logprobs", -1),
        ("kv_cache_gib", float("inf")),
        ("tpot_slo_ms", 0.0),
    ],
)
def test_options_out_of_range(field: str, value: float) -> None:
    with pytest.raises(ServeError, match=field):
        ServeOptions(**{field: value})  # type: ignore[arg-type]
