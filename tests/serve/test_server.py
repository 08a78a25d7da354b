"""The server on a port: from the first request to the drain."""

from __future__ import annotations

import socket

import pytest

from pcg.errors import ServeError
from pcg.serve.listening import listen, url_of
from pcg.serve.options import ServeOptions
from tests.support import serving


def test_a_server_over_loopback() -> None:
    with serving.on_a_port() as served, served.client() as client:
        assert client.get("/health").json() == {"status": "running"}
        body = {"model": serving.MODEL, "prompt": "Hello", "max_tokens": 4, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as reply:
            lines = list(reply.iter_lines())
        assert lines[-2:] == ["data: [DONE]", ""]


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
    [("port", -1), ("max_num_seqs", 0), ("kv_cache_gib", 0.0), ("max_logprobs", -1)],
)
def test_options_out_of_range(field: str, value: float) -> None:
    with pytest.raises(ServeError, match=field):
        ServeOptions(**{field: value})  # type: ignore[arg-type]
