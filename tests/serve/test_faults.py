"""Faults of clients: they leave, do not read, send too much, or ask for too much at once."""

import asyncio
import json
import re
import select
import socket
import threading
from contextlib import contextmanager, suppress

import pytest

from pcg.keys import Keys
from pcg.runtime.metrics.events import Kind
from pcg.serve.app import ROUTERS
from pcg.serve.http import connection as connection_module
from tests.support import serving
from tests.support.waiting import until

LONG = {"model": serving.MODEL, "prompt": [1, 2, 3], "max_tokens": 100, "ignore_eos": True}


@pytest.fixture(scope="module")
def served():
    with serving.on_a_port(stream_timeout_s=1.0, max_body_mib=1.0) as served:
        yield served


@contextmanager
def held(service):
    """The engine does not step meanwhile."""
    gate, is_there = threading.Event(), threading.Event()

    def wait():
        is_there.set()
        gate.wait()

    service.client.engine.call(wait)
    assert is_there.wait(60)
    try:
        yield
    finally:
        gate.set()


def is_free(service):
    """Nothing runs or waits, and no page is held."""
    numbers = service.client.engine.numbers()
    idle = numbers.running == numbers.waiting == 0
    return idle and numbers.free_pages == numbers.pages


def counted(service):
    """Counts of the engine's events from now on."""
    counts = {}

    def listen(event):
        counts[event.kind] = counts.get(event.kind, 0) + 1

    stop = service.client.engine.engine.log.listen(listen)
    return counts, stop


def connect(served, receive_bytes=None):
    host, port = served.url.removeprefix("http://").split(":")
    connection = socket.socket()
    if receive_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.settimeout(30)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.connect((host, int(port)))
    return connection


def post(path, body, *headers):
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: test",
        f"Authorization: Bearer {serving.KEY}",
        "Content-Type: application/json",
        *headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


def asking(body):
    content = json.dumps(body).encode()
    return post("/v1/completions", content, f"Content-Length: {len(content)}")


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_is_served_for_a_step_at_most(served, monkeypatch, stream):
    """Once it is known: who ends its side of the connection may still read."""
    monkeypatch.setattr(connection_module, "LEFT_S", 0.0)
    service = served.service
    counts, stop = counted(service)
    connection = connect(served)
    connection.sendall(asking({**LONG, "n": 16, "stream": stream}))
    until(lambda: service.client.engine.numbers().running == 16)
    if stream:
        assert b"200 OK" in connection.recv(1000)
    with held(service):
        before = counts.get(Kind.TOKEN, 0)
        calls = service.client.engine._calls.qsize()
        connection.close()
        until(lambda: service.client.engine._calls.qsize() > calls)
    until(lambda: is_free(service) and counts.get(Kind.CANCELLED, 0) == 16)
    stop()
    assert counts.get(Kind.TOKEN, 0) <= before + 16  # the step that was due
    assert Kind.FINISHED not in counts


def test_who_does_not_read_is_ended(served):
    """After `stream_timeout_s`, with no more in memory than it was sent until then."""
    service = served.service
    with connect(served, receive_bytes=4096) as connection:
        body = {**LONG, "n": 64, "stream": True, "logprobs": 20, "return_token_ids": True}
        connection.sendall(asking(body))
        until(lambda: service.client.engine.numbers().running > 0)
        until(lambda: is_free(service))
        until(lambda: not served.server.server_state.tasks)
        until(lambda: not served.server.server_state.connections)
    assert is_free(service)
    with served.client() as client:
        assert client.post("/v1/completions", json={**LONG, "max_tokens": 1}).is_success


def test_bodies_are_counted_and_not_believed(served):
    """Neither a length that is announced, nor none, nor a gigabyte in chunks."""
    huge = 2**30
    with connect(served) as connection:
        connection.sendall(post("/v1/completions", b"{", f"Content-Length: {huge}"))
        assert connection.recv(1000).startswith(b"HTTP/1.1 413")
    chunk = b"100000\r\n" + b" " * 2**20 + b"\r\n"
    sent = 0
    with connect(served) as connection:
        connection.sendall(post("/v1/completions", b"", "Transfer-Encoding: chunked"))
        try:
            while sent < huge:
                connection.sendall(chunk)
                sent += len(chunk)
        except (ConnectionError, TimeoutError):
            pass
    assert sent < 2**25
    with served.client() as client:
        reply = client.post("/v1/completions", content=b" " * (2**20 + 1), headers=JSON)
        assert reply.status_code == 413
        assert reply.json()["error"]["code"] == "body_too_large"
        assert client.post("/v1/completions", json=LONG).is_success


JSON = {"content-type": "application/json"}


def test_a_body_that_does_not_come(served):
    with connect(served) as connection:
        connection.sendall(post("/v1/completions", b"{", "Content-Length: 100"))
        assert connection.recv(1000).startswith(b"HTTP/1.1 408")


def test_heads_have_a_bound(served, monkeypatch):
    """One header, many of them, or none that ends."""
    for part in (b"a" * 2**16, b": a\r\nx-" * 2**14):
        sent = 0
        with connect(served) as connection, suppress(ConnectionError):
            connection.sendall(b"GET /health HTTP/1.1\r\nx-")
            while sent < 2**26:
                connection.sendall(part)
                sent += len(part)
        assert sent < 2**25
    monkeypatch.setattr(connection_module, "HEAD_S", 0.2)
    with connect(served) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        assert connection.recv(1000) == b""


@pytest.mark.parametrize("upgrade", [b"", b"Connection: Upgrade\r\nUpgrade: websocket\r\n"])
def test_who_sends_what_begins_no_request_is_ended(served, monkeypatch, caplog, upgrade):
    """Empty lines behind a reply, and another protocol, which is not logged either."""
    monkeypatch.setattr(connection_module, "HEAD_S", 0.2)
    with connect(served) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: test\r\n" + upgrade + b"\r\n")
        found = b""
        while b"running" not in found:
            found += connection.recv(1000)
        assert found.startswith(b"HTTP/1.1 200")
        connection.sendall(b"\r\n")
        assert connection.recv(1000) == b""
    assert not [one for one in caplog.records if one.name.startswith("uvicorn")]


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("framing", ["length", "chunked"])
def test_who_offers_another_protocol_is_answered_in_this_one(served, framing, is_split):
    """With its body, as Java's client sends it first of all; the connection goes on."""
    content = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(content), content)
    size = (
        f"Content-Length: {len(content)}" if framing == "length" else "Transfer-Encoding: chunked"
    )
    offer = ["Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk"]
    asked = post("/v1/completions", content if framing == "length" else chunks, size, *offer)
    with connect(served) as connection:
        for _ in range(2):
            place = asked.index(b"\r\n\r\n") + 9 if is_split else len(asked)
            connection.sendall(asked[:place])
            if is_split:
                connection.sendall(asked[place:])
            found = b""
            while b'"usage"' not in found or not found.endswith(b"}"):
                part = connection.recv(2000)
                assert part, f"the connection ended after {found!r}"
                found += part
            assert found.startswith(b"HTTP/1.1 200")
            assert json.loads(found.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == 1
        connection.sendall(b"CONNECT a:80 HTTP/1.1\r\nHost: a:80\r\n\r\n")
        assert connection.recv(2000).startswith(b"HTTP/1.1 400")


def test_a_reply_that_ends_before_its_request_ends_the_connection(served):
    with connect(served) as connection:
        head = b"GET /health HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n"
        connection.sendall(head)
        found = b""
        while part := connection.recv(1000):
            found += part
        assert found.startswith(b"HTTP/1.1 200")
        assert b"connection: close" in found


@pytest.mark.parametrize("size", [1_000, 100_000])
def test_no_reply_ends_a_connection_without_a_word(served, size):
    """Of all methods of all paths: bodies come in a packet of their own, as those of httpx do."""
    paths = {route.path for router in ROUTERS for route in router.routes}
    for path in sorted(re.sub(r"{[^}]*}", "none", path) for path in {*paths, "/no/such/path"}):
        for method in ("PUT", "POST", "DELETE"):
            asked = post(path, b"", f"Content-Length: {size}").replace(b"POST", method.encode(), 1)
            with connect(served) as connection:
                connection.sendall(asked)
                select.select([connection], [], [], 0.01)  # most replies need no body
                with suppress(ConnectionError):
                    connection.sendall(b" " * size)
                head, body = reply(connection)
                if b"connection: close" not in head:
                    assert b"Content-Length" not in body
                    connection.sendall(b"GET /health HTTP/1.1\r\nHost: test\r\n\r\n")
                    head, _ = reply(connection)
                    assert head.startswith(b"HTTP/1.1 200"), (method, path)


def reply(connection):
    """The head and the body of the next reply, which says how long it is."""
    found = b""
    while b"\r\n\r\n" not in found:
        part = connection.recv(2**16)
        assert part, found
        found += part
    head, _, body = found.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head)
    assert length, head
    while len(body) < int(length[1]):
        body += connection.recv(2**16)
    return head, body


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_ends_its_side_is_answered(served, monkeypatch, stream):
    """Also where it is looked for meanwhile, which it hears as an interim reply."""
    body = {**LONG, "stream": stream}
    monkeypatch.setattr(connection_module, "LEFT_S", 60.0)
    with connect(served) as connection:
        connection.sendall(asking(body))
        connection.shutdown(socket.SHUT_WR)
        whole = to_the_end(connection)
    assert whole.startswith(b"HTTP/1.1 200")
    assert b'"finish_reason":"length"' in whole
    monkeypatch.setattr(connection_module, "LEFT_S", 0.0)
    with held(served.service), connect(served) as connection:
        connection.sendall(asking(body))
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
    until(lambda: is_free(served.service))
    for unfinished in (b"", b"GET /health HT", post("/v1/completions", b"{", "Content-Length: 9")):
        with connect(served) as connection:
            connection.sendall(unfinished)
            connection.shutdown(socket.SHUT_WR)
            assert to_the_end(connection) == b""


def to_the_end(connection):
    found = b""
    while part := connection.recv(2**16):
        found += part
    return found


def test_strangers_bodies_are_not_read(served):
    with connect(served) as connection:
        start = b"POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Length: 100\r\n\r\n"
        connection.sendall(start)
        assert connection.recv(1000).startswith(b"HTTP/1.1 401")


@pytest.mark.parametrize("stranger", [False, True])
def test_who_sends_too_much_reads_why(served, stranger):
    """Not a reset, which clients take for a broken connection, and ask again."""
    body = b" " * 2**23
    asked = post("/v1/completions", body, f"Content-Length: {len(body)}")
    if stranger:
        asked = asked.replace(serving.KEY.encode(), b"another")
    with connect(served) as connection:
        connection.sendall(asked)
        found = b""
        while part := connection.recv(2**16):
            found += part
    assert found.startswith(b"HTTP/1.1 401" if stranger else b"HTTP/1.1 413")
    assert found.endswith(b"}}")


def test_headers_behind_a_body_are_dropped(served):
    """A proxy that looks at heads has not seen them."""
    body = b"2\r\n{}\r\n0\r\nAuthorization: Bearer " + serving.KEY.encode() + b"\r\n\r\n"
    asked = post("/v1/completions", body, "Transfer-Encoding: chunked")
    header = f"Authorization: Bearer {serving.KEY}\r\n".encode()
    with connect(served) as connection:
        connection.sendall(asked.replace(header, b"", 1))
        assert connection.recv(1000).startswith(b"HTTP/1.1 401")


@pytest.mark.slow
def test_ten_thousand_requests_of_two_tenants():
    """What is taken ends, the rest is told when to come again, and no page is lost."""
    keys = Keys([serving.key("a"), serving.key("b")])
    options = {"tenant_queue": 50, "key_requests": 200, "max_num_seqs": 16}
    with serving.service_of(keys=keys, **options) as service:
        replies = asyncio.run(_ask_all(service, 5000))
        statuses = {name: [reply.status_code for reply in of] for name, of in replies.items()}
        for name, found in statuses.items():
            assert set(found) == {200, 429}, name
            assert found.count(200) == 50  # `tenant_queue`, whatever the other tenant sends
        refused = [reply for of in replies.values() for reply in of if reply.status_code == 429]
        assert all(reply.headers["retry-after"] == "1" for reply in refused)
        codes = {reply.json()["error"]["code"] for reply in refused}
        assert codes == {"queue_full", "too_many_requests"}
        assert is_free(service)


@pytest.mark.parametrize("stream", [True, False])
def test_prompts_of_one_request_are_taken_together(stream):
    """Where the queue has room for some of them, none is answered."""
    keys = Keys([serving.key("a"), serving.key("b")])
    body = {"model": serving.MODEL, "max_tokens": 40, "ignore_eos": True}

    async def ask(service):
        async with serving.client_of(service, serving.headers_of("a")) as client:
            with held(service):
                first = {**body, "prompt": ["ab"] * 4}
                before = asyncio.ensure_future(client.post("/v1/completions", json=first))
                while service.client.engine._calls.qsize() < 4 + 1:  # one waits for what came
                    await asyncio.sleep(0.005)
                second = {**body, "prompt": ["ab", "c", "d"], "stream": stream}
                refused = asyncio.ensure_future(client.post("/v1/completions", json=second))
                while service.client.engine._calls.qsize() < 5 + 1 + 1:
                    await asyncio.sleep(0.005)
            return await before, await refused

    with serving.service_of(keys=keys, tenant_queue=5) as service:
        before, refused = asyncio.run(ask(service))
        assert before.status_code == 200
        assert len(before.json()["choices"]) == 4
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "queue_full"
        until(lambda: is_free(service))
        assert service.client.engine.engine.totals.output_tokens < 4 * 40 + 40


async def _ask_all(service, count):
    """Ask so many times with each of two keys, before the engine begins with any."""
    body = {**LONG, "max_tokens": 2}
    async with (
        serving.client_of(service, serving.headers_of("a")) as a,
        serving.client_of(service, serving.headers_of("b")) as b,
    ):
        with held(service):
            asked = {
                name: [
                    asyncio.ensure_future(client.post("/v1/completions", json=body))
                    for _ in range(count)
                ]
                for name, client in (("a", a), ("b", b))
            }
            # `tenant_queue` of each wait, and all others are refused before the engine goes on.
            while sum(one.done() for of in asked.values() for one in of) < 2 * (count - 50):
                await asyncio.sleep(0.01)
        return {name: await asyncio.gather(*of) for name, of in asked.items()}
