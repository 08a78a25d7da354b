"""Whatever a client sends, it is told or dropped, and the others are answered as before."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pcg.errors import SplitError
from pcg.runtime.executor import Executor
from pcg.split.base.base_executor import BaseExecutor
from pcg.split.base.base_loop import BaseLoop
from pcg.split.base.options import BaseOptions
from pcg.split.client.caller import Caller
from pcg.split.messages import VERSION, Message, frames_of, header_of, read_message
from pcg.split.zeromq import ZeroMqEndpoint, transport_to
from tests.support.split_base import KEY
from tests.support.waiting import until

zmq = pytest.importorskip("zmq")
UP = "model.layers.0.mlp.up_proj.weight"
HELLO = Message("hello", 1, {"version": VERSION, "key": KEY})


@dataclass
class Served:
    """A base on a thread, and a well-behaved client of it."""

    loop: BaseLoop
    caller: Caller
    x: Tensor
    y: Tensor

    @property
    def where(self) -> str:
        return self.loop.endpoint.where

    def answers(self) -> bool:
        """Ask for a product; returns whether the answer is right."""
        (found,) = self.caller.call("run", (self.x,), piece=f"linear:{UP}").tensors
        return torch.allclose(found, self.y, atol=1e-5)


@contextmanager
def served(whole: Executor, transport: str = "tcp", **options: Any) -> Iterator[Served]:
    endpoint = ZeroMqEndpoint("127.0.0.1", 0, 2**24)
    loop = BaseLoop(BaseExecutor(whole), endpoint, BaseOptions(api_key=(KEY,), **options))
    thread = threading.Thread(target=loop.run)
    thread.start()
    caller = Caller(transport_to(endpoint.where, transport), {"key": KEY})
    weight = loop.base.multiplied[UP]
    x = torch.randn(3, weight.shape[1])
    try:
        yield Served(loop, caller, x, x @ weight.t())
    finally:
        caller.close()
        loop.stop()
        thread.join(60)
        endpoint.close()
    assert not thread.is_alive()


@contextmanager
def raw(where: str, **options: int) -> Iterator[Any]:
    """A socket of somebody who follows no protocol of ours."""
    context = zmq.Context()
    end = context.socket(zmq.DEALER)
    end.set(zmq.LINGER, 0)
    for name, value in options.items():
        end.set(getattr(zmq, name), value)
    end.connect(f"tcp://{where}")
    try:
        yield end
    finally:
        context.destroy(0)


def reply_to(end: Any, frames: Any) -> Message:
    end.send_multipart(frames)
    assert end.poll(30_000)
    return read_message(end.recv_multipart())


@pytest.mark.parametrize(("shape", "frame"), [([2**40], b""), ([2**70, 0], b""), ([2**62, 0], b"")])
def test_a_stranger_without_a_key_ends_no_base(
    whole: Executor, shape: list[int], frame: bytes
) -> None:
    header = {"op": "hello", "seq": 1, "tensors": [["float64", shape]]}
    with served(whole) as base, raw(base.where) as end:
        assert reply_to(end, [json.dumps(header).encode(), frame]).op == "error"
        assert base.answers()


def test_what_a_transport_cannot_read_is_answered(
    whole: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("what nobody has thought of")

    with served(whole) as base, raw(base.where) as end:
        with monkeypatch.context() as patch:
            patch.setattr(base.loop.endpoint, "_read", fail)
            assert "no message that a base can read" in reply_to(end, [b"{}"]).fields["error"]
        assert base.answers()


def test_an_empty_tensor_comes_back_through_shared_memory(whole: Executor) -> None:
    with served(whole, "shared-memory") as base:
        given = (torch.empty(0, 3), torch.ones(2))
        found = base.caller.call("echo", given).tensors
        assert [tuple(one.shape) for one in found] == [(0, 3), (2,)]
        assert base.answers()


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_headers_that_say_anything_are_refused_and_nothing_else_happens(whole: Executor) -> None:
    run = {"op": "run", "seq": 2, "piece": f"linear:{UP}", "serves": True}
    one = [["float32", [1, 64]]]
    row = bytes(4 * 64)
    wrong = [
        [b"x" * (2**20 + 1)],
        [b"[" * 100_000],
        [],
        [b"", b"", b""],
        [json.dumps({**run, "tensors": [["float32", [-1, 64]]]}).encode(), row],
        [json.dumps({**run, "tensors": [["float32", [2**40, 2**40]]]}).encode(), row],
        [json.dumps({**run, "tensors": [["float32", [1, 65]]]}).encode(), row],
        [json.dumps({**run, "tensors": one * 17}).encode(), *[row] * 17],
        [json.dumps({**run, "tensors": one}).encode()],
        [json.dumps({**run, "tensors": one, "seq": 1e9}).encode(), row],
        [json.dumps({**run, "tensors": one, "places": [2**70]}).encode()],
        [json.dumps({**run, "tensors": one, "piece": "linear:" + "a+" * 9000}).encode(), row],
        [json.dumps({**run, "tensors": one, "piece": f"linear:{UP}+{UP}"}).encode(), row],
        [json.dumps({"op": "share", "seq": 3, "tensors": [], "bytes": 2**62}).encode()],
        [json.dumps({"op": "rows", "seq": 3, "tensors": [], "name": UP, "begin": -1}).encode()],
    ]
    with served(whole) as base, raw(base.where) as end:
        assert reply_to(end, [bytes(one) for one in frames_of(HELLO)]).op == "reply"
        for frames in wrong:
            if frames:
                assert reply_to(end, frames).op == "error", frames[0][:100]
            else:
                end.send_multipart([b""])
                assert end.poll(30_000)
                assert read_message(end.recv_multipart()).op == "error"
            assert base.answers()
        assert base.loop.waiting == 0


HEADERS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=20,
)


@settings(max_examples=150, deadline=None)
@given(HEADERS, st.binary(max_size=64), st.integers(0, 3))
def test_no_header_is_an_error_of_ours(header: Any, frame: bytes, count: int) -> None:
    texts = [json.dumps(header).encode(), frame]
    if isinstance(header, dict):
        extras: list[dict[str, Any]] = [{"tensors": header}, {"tensors": [header]}]
        texts += [json.dumps({**header, "op": "run", "seq": 1, **one}).encode() for one in extras]
    for text in texts:
        try:
            message = read_message([text, *[frame] * count])
        except SplitError:
            continue
        assert isinstance(message.op, str)
        assert len(message.tensors) == count


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 200), st.binary(min_size=1, max_size=4))
def test_a_header_with_other_bytes_in_it_is_a_message_or_refused(at: int, other: bytes) -> None:
    message = Message("run", 2, {"piece": f"linear:{UP}", "serves": True}, (torch.ones(2, 3),))
    text = header_of(message)
    at = min(at, len(text))
    try:
        found = read_message([text[:at] + other + text[at + len(other) :], bytes(24)])
    except SplitError:
        return
    assert sum(tensor.nbytes for tensor in found.tensors) == 24


def test_a_flood_of_tiny_requests_keeps_nobody_out(whole: Executor) -> None:
    tiny = [bytes(one) for one in frames_of(Message("stats", 2))]
    with served(whole) as base, raw(base.where, SNDHWM=100) as end:
        assert reply_to(end, [bytes(one) for one in frames_of(HELLO)]).op == "reply"
        stopped = threading.Event()
        sent = [0]

        def flood() -> None:
            while not stopped.is_set():
                if end.poll(10, zmq.POLLOUT):
                    end.send_multipart(tiny)
                    sent[0] += 1
                while end.poll(0):
                    end.recv_multipart()

        thread = threading.Thread(target=flood)
        thread.start()
        try:
            until(lambda: sent[0] > 2000)
            for _ in range(20):
                assert base.answers()
        finally:
            stopped.set()
            thread.join(60)
        assert base.loop.waiting <= 1


def test_a_client_that_reads_nothing_is_dropped(
    whole: Executor, caplog: pytest.LogCaptureFixture
) -> None:
    """Its replies fill what the system keeps, then eight more; then it is gone, and its queue."""
    caplog.set_level("INFO", "pcg.split")
    x = torch.ones(2**13, 64)
    call = [bytes(one) for one in frames_of(Message("run", 2, {"piece": f"linear:{UP}"}, (x,)))]
    with served(whole) as base, raw(base.where, RCVHWM=1, SNDHWM=1, RCVBUF=4096) as end:
        end.send_multipart([bytes(one) for one in frames_of(HELLO)])
        until(lambda: base.loop.clients == 2)

        def is_dropped() -> bool:
            if end.poll(10, zmq.POLLOUT):
                end.send_multipart(call)
            return bool(base.loop.clients == 1)

        until(is_dropped, 120)
        assert base.answers()
        assert "is gone" in caplog.text


def test_half_messages_and_what_is_no_zeromq_end_with_their_connection(whole: Executor) -> None:
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    half = b"\x01\x05abc"  # the first of several frames, of five bytes, three of which come
    endless = b"\x03" + struct.pack(">Q", 2**62)  # more bytes than a message may have
    with served(whole) as base:
        before = descriptors()
        for text in (
            b"GET / HTTP/1.1\r\n\r\n",
            greeting[:11],
            greeting,
            greeting + bytes((4, len(ready))) + ready + half,
            greeting + bytes((4, len(ready))) + ready + endless + b"x" * 100,
            os.urandom(4096),
        ):
            host, _, port = base.where.rpartition(":")
            with socket.create_connection((host, int(port))) as one:
                one.sendall(text)
                assert base.answers()
            assert base.answers()
        until(lambda: descriptors() <= before)
        assert base.loop.clients == 1


def test_memory_that_is_shared_again_and_again_is_freed(whole: Executor) -> None:
    with served(whole, "shared-memory") as base, raw(base.where) as end:
        assert reply_to(end, [bytes(one) for one in frames_of(HELLO)]).op == "reply"
        share = [bytes(one) for one in frames_of(Message("share", 2, {"bytes": 2**20}))]
        assert reply_to(end, share).op == "reply"
        before = descriptors()
        for _ in range(50):
            assert reply_to(end, share).op == "reply"
        assert descriptors() <= before
        assert base.answers()
