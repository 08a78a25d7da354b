"""Calls that are interrupted, that break their connection, or that are larger than a base takes."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import torch

from pcg.errors import BaseLostError, SplitError
from pcg.runtime.executor import Executor
from pcg.split import zeromq
from pcg.split.client.caller import Caller
from pcg.split.messages import LINEAR, Message, Piece, frames_of
from pcg.split.transport import Disconnected, Transport
from pcg.split.zeromq import ZeroMqTransport, transport_to
from tests.support.split_base import KEY, listening_base

pytest.importorskip("zmq")
UP = "model.layers.0.mlp.up_proj.weight"


class Interrupted(ZeroMqTransport):
    """A transport whose user presses Ctrl-C once, while a reply is under way."""

    is_pressed = False

    def _read(self, frames: Any) -> Message:
        if self.is_pressed:
            self.is_pressed = False
            raise KeyboardInterrupt
        return super()._read(frames)


def test_a_call_that_was_interrupted_leaves_nothing_to_the_next(whole: Executor) -> None:
    with listening_base(whole) as where:
        transport = Interrupted(where, shares_memory=True)
        caller = Caller(transport, {"key": KEY})
        try:
            rows, width = caller.facts.pieces[UP]
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
        facts = msgspec.to_builtins(known.facts)
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


@contextmanager
def talker(answer: Callable[[Sequence[bytes]], Iterator[Message]]) -> Iterator[str]:
    """A base that says what `answer` yields after a first message; yields its address."""
    import zmq

    context, is_over = zmq.Context(), threading.Event()
    socket = context.socket(zmq.ROUTER)
    socket.set(zmq.LINGER, 0)
    port = socket.bind_to_random_port("tcp://127.0.0.1")

    def talk() -> None:
        client, *frames = socket.recv_multipart()
        for message in answer(frames):
            while not is_over.is_set() and not socket.poll(20, zmq.POLLOUT):
                pass
            if is_over.is_set():
                return
            socket.send_multipart([client, *frames_of(message)])

    thread = threading.Thread(target=talk)
    thread.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        is_over.set()
        thread.join(60)
        context.destroy(0)


def test_a_base_that_sends_other_replies_without_end_is_left() -> None:
    with talker(lambda _: itertools.repeat(Message("reply", 7))) as where:
        transport = transport_to(where, "tcp")
        transport.open()
        with pytest.raises(Disconnected, match=r"no answer in 0\.3 s"):
            transport.exchange(Message("hello", 1), 0.3)
        transport.close()


def test_a_base_that_says_that_it_is_busy_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By a clock that moves a second each time that somebody looks; nobody answers for 60 s."""
    seconds = itertools.count()
    monkeypatch.setattr(zeromq.time, "monotonic", lambda: float(next(seconds)))

    def answer(frames: Sequence[bytes]) -> Iterator[Message]:
        yield from itertools.repeat(Message("busy", 1, {"requests": 3}), 200)
        yield Message("reply", 1, {"found": True})

    with talker(answer) as where:
        transport = transport_to(where, "tcp")
        transport.open()
        assert transport.exchange(Message("run", 1), 60.0).fields["found"]
        transport.close()
    assert next(seconds) > 400
    said = [one.message for one in caplog.records if "is busy" in one.message]
    assert 3 <= len(said) <= 8
    assert "3 requests of its clients wait, this one for 1" in said[0]
