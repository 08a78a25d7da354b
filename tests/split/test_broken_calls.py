"""Calls that are interrupted, that break their connection, or that are larger than a base takes."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import pcg.compiler as compiler
from pcg.errors import BaseLostError, SplitError
from pcg.runtime.executor import Executor
from pcg.split.client.caller import Caller
from pcg.split.messages import Message, frames_of
from pcg.split.pieces import LINEAR, Piece
from pcg.split.transports.transport import Disconnected, Transport
from pcg.split.transports.zeromq_client import SharedMemoryTransport, transport_to
from tests.support import oracle
from tests.support.families import BY_NAME
from tests.support.split_base import KEY, listening_base

pytest.importorskip("zmq")
UP = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def whole() -> Executor:
    return compiler.compile(oracle.random_model(BY_NAME["llama3"].config(1)), verify=False)


class Interrupted(SharedMemoryTransport):
    """A transport whose user presses Ctrl-C once, while a reply is under way."""

    is_pressed = False

    def _read(self, frames: Any) -> Message:
        if self.is_pressed:
            self.is_pressed = False
            raise KeyboardInterrupt
        return super()._read(frames)


def test_a_call_that_was_interrupted_leaves_nothing_to_the_next(whole: Executor) -> None:
    with listening_base(whole) as where:
        transport = Interrupted(where)
        caller = Caller(transport, {"key": KEY})
        try:
            rows, width = caller.facts["pieces"][UP]
            x = torch.randn(3, width)
            first = caller.product(Piece(LINEAR, (UP,)), x, serves=False)
            shared = transport._shared
            assert shared is not None
            transport.is_pressed = True
            with pytest.raises(KeyboardInterrupt):
                caller.product(Piece(LINEAR, (UP,)), torch.zeros(3, width), serves=False)
            # The late reply has neither this connection nor its memory any more.
            assert transport._socket is None
            assert shared.descriptor < 0
            again = caller.product(Piece(LINEAR, (UP,)), x, serves=False)
            assert again.shape == (3, rows)
            assert torch.equal(again, first)
            assert transport._shared is not None
            assert transport._shared is not shared
        finally:
            caller.close()


class Fake(Transport):
    """A base without facts worth knowing, all of whose other calls fail."""

    where = "nowhere"

    def __init__(self, facts: dict[str, Any] | None, error: BaseException) -> None:
        self.facts, self.error = facts, error
        self.opened, self.closed = 0, 0

    def open(self) -> None:
        self.opened += 1

    def close(self) -> None:
        self.closed += 1

    def exchange(self, message: Message, timeout_s: float) -> Message:
        if message.op != "hello" or self.facts is None:
            raise self.error
        return Message("reply", message.seq, self.facts)


def test_connecting_that_is_interrupted_closes_what_it_opened() -> None:
    fake = Fake(None, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        Caller(fake, {})
    assert (fake.opened, fake.closed) == (1, 1)


def test_a_call_that_breaks_each_connection_ends(whole: Executor) -> None:
    with listening_base(whole) as where:
        known = Caller(transport_to(where, "tcp"), {"key": KEY})
        facts = dict(known.facts)
        known.close()
    fake = Fake(facts, Disconnected("the connection is closed"))
    caller = Caller(fake, {}, lost_s=60)
    with pytest.raises(BaseLostError, match=r"gone each of 9 times that run was called"):
        caller.call("run", (torch.ones(1),), piece="x")
    assert fake.opened == 9


@pytest.mark.parametrize("kind", ["tcp", "shared-memory"])
def test_what_is_larger_than_a_base_takes_is_not_sent(whole: Executor, kind: str) -> None:
    with listening_base(whole, max_request_mib=2) as where:
        caller = Caller(transport_to(where, kind), {"key": KEY})
        try:
            with pytest.raises(SplitError, match=r"2,097,156 bytes, .* takes 2,097,152; send"):
                caller.call("echo", (torch.zeros(2**19 + 1),))
            (found,) = caller.call("echo", (torch.ones(2**16),)).tensors
            assert torch.equal(found, torch.ones(2**16))
        finally:
            caller.close()


def test_a_base_that_sends_other_replies_without_end_is_left() -> None:
    import zmq

    context, is_over = zmq.Context(), threading.Event()
    socket = context.socket(zmq.ROUTER)
    socket.set(zmq.LINGER, 0)
    port = socket.bind_to_random_port("tcp://127.0.0.1")

    def flood() -> None:
        client = socket.recv_multipart()[0]
        other = [client, *frames_of(Message("reply", 7))]
        while not is_over.is_set():
            if socket.poll(20, zmq.POLLOUT):
                socket.send_multipart(other)

    thread = threading.Thread(target=flood)
    thread.start()
    transport = transport_to(f"127.0.0.1:{port}", "tcp")
    try:
        transport.open()
        with pytest.raises(Disconnected, match=r"no answer in 0\.3 s"):
            transport.exchange(Message("hello", 1), 0.3)
    finally:
        is_over.set()
        thread.join(60)
        transport.close()
        context.destroy(0)
