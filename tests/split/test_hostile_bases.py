"""What a damaged or busy base says is an error of pcg's at its client, or waited for."""

import itertools
import threading
from contextlib import contextmanager
from dataclasses import replace

import msgspec
import pytest
import torch

from pcg import LoraConfig
from pcg.errors import BaseLostError, PcgError, SplitError
from pcg.split import zeromq
from pcg.split.client.caller import Caller
from pcg.split.client.connect import connect
from pcg.split.messages import LINEAR, Message, Piece, frames_of
from pcg.split.transport import Disconnected, Transport
from pcg.split.zeromq import ZeroMqTransport, transport_to
from tests.support.split_base import EXAMPLES, KEY, listening_base, running_base


class Damaged(Transport):
    """Another transport, some of whose replies are damaged.

    Args:
        op: of the requests whose replies are.
        fields: put in place of a reply's; None leaves a field out.
        tensors: makes other tensors of a reply's.
    """

    def __init__(self, inner, op, fields=None, tensors=None):
        self.where = inner.where
        self._inner, self._op, self._fields, self._tensors = inner, op, fields or {}, tensors

    def open(self):
        self._inner.open()

    def close(self):
        self._inner.close()

    def exchange(self, message, timeout_s):
        reply = self._inner.exchange(message, timeout_s)
        if message.op != self._op or reply.op == "error":
            return reply
        fields = {**reply.fields, **self._fields}
        fields = {name: value for name, value in fields.items() if value is not None}
        tensors = reply.tensors if self._tensors is None else self._tensors(reply.tensors)
        return replace(reply, fields=fields, tensors=tensors)


FACTS = {
    "no name": {"name": None},
    "no digest": {"digest": None},
    "no config": {"config": None},
    "a config of another kind": {"config": ["llama"]},
    "a config of no model": {"config": {}},
    "a config with words for sizes": {"config": {"model_type": "llama", "hidden_size": "many"}},
    "an unknown dtype": {"dtype": "int8"},
    "a device without a name": {"device": 3},
    "a file for a device": {"device": "./profile.json"},
    "rates of no kind": {"rates": {"memory_bytes_per_s": 1e9}},
    "rates that are words": {
        "rates": {"product_flops_per_s": {"f32": "fast"}, "memory_bytes_per_s": 1e9}
    },
    "rates of nothing": {"rates": {"product_flops_per_s": {"f32": 0.0}, "memory_bytes_per_s": 1e9}},
    "no largest message": {"most_bytes": 0},
    "no pieces": {"pieces": {}},
    "pieces without shapes": {"pieces": {"model.layers.0.self_attn.q_proj.weight": 7}},
    "pieces of three dims": {"pieces": {"model.layers.0.self_attn.q_proj.weight": [1, 2, 3]}},
    "nothing to fetch": {"fetched": {}},
    "tensors of no size": {"fetched": {"model.norm.weight": [-1]}},
    "flags that are numbers": {"graphs": 1},
    "files that are none": {"files": {"tokenizer.json": 3}},
    "absent names that are none": {"absent": "all"},
}


@pytest.mark.parametrize("fields", FACTS.values(), ids=FACTS)
def test_facts_that_are_none_are_refused(whole, fields):
    with running_base(whole) as base, pytest.raises(PcgError):
        connect(Damaged(base.endpoint.transport(), "hello", fields), api_key=KEY, cut="linear")


REPLIES = {
    "no tensor": ("run", lambda given: ()),
    "one more": ("run", lambda given: (*given, given[0])),
    "another dtype": ("run", lambda given: [one.double() for one in given]),
    "fewer rows": ("run", lambda given: [one[1:] for one in given]),
    "more columns": ("run", lambda given: [torch.cat([one, one], -1) for one in given]),
    "a fetched tensor of another dtype": ("fetch", lambda given: [one.half() for one in given]),
    "no fetched tensor": ("fetch", lambda given: ()),
}


@pytest.mark.parametrize(
    ("damage", "cut"),
    [
        *((one, "linear") for one in REPLIES.values()),
        (REPLIES["one more"], "searched"),
        (REPLIES["another dtype"], "searched"),
    ],
    ids=[*REPLIES, "one more of a graph", "another dtype of a graph"],
)
def test_replies_that_do_not_fit_are_refused(whole, damage, cut):
    op, tensors = damage
    recipe = LoraConfig(r=2, target_modules=["q_proj"])

    def use(base):
        transport = Damaged(base.endpoint.transport(), op, tensors=tensors)
        with connect(transport, None, {"x": recipe}, api_key=KEY, cut=cut, link="1,1") as split:
            split.finetune(EXAMPLES, "x", max_steps=1)

    with running_base(whole) as base, pytest.raises(SplitError, match=f"answers {op} with"):
        use(base)


pytest.importorskip("zmq")
UP = "model.layers.0.mlp.up_proj.weight"


class Interrupted(ZeroMqTransport):
    """A transport whose user presses Ctrl-C once, while a reply is under way."""

    is_pressed = False

    def _read(self, frames):
        if self.is_pressed:
            self.is_pressed = False
            raise KeyboardInterrupt
        return super()._read(frames)


def test_a_call_that_was_interrupted_leaves_nothing_to_the_next(whole):
    with listening_base(whole) as where:
        transport = Interrupted(where, shares_memory=True)
        caller = Caller(transport, {"key": KEY})
        try:
            rows, width = caller.facts.pieces[UP]
            x = torch.randn(3, width)
            first = caller.product(Piece(LINEAR, (UP,)), x, serves=False)
            shared = transport._shared
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

    def __init__(self, facts, error):
        self.facts, self.error = facts, error
        self.opened, self.closed = 0, 0

    def open(self):
        self.opened += 1

    def close(self):
        self.closed += 1

    def exchange(self, message, timeout_s):
        if message.op != "hello" or self.facts is None:
            raise self.error
        return Message("reply", message.seq, self.facts)


def test_connecting_that_is_interrupted_closes_what_it_opened():
    fake = Fake(None, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        Caller(fake, {})
    assert (fake.opened, fake.closed) == (1, 1)


def test_a_call_that_breaks_each_connection_ends(whole):
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
def test_what_is_larger_than_a_base_takes_is_not_sent(whole, kind):
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
def talker(answer):
    """A base that says what `answer` yields after a first message; yields its address."""
    import zmq

    context, is_over = zmq.Context(), threading.Event()
    socket = context.socket(zmq.ROUTER)
    socket.set(zmq.LINGER, 0)
    port = socket.bind_to_random_port("tcp://127.0.0.1")

    def talk():
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


def test_a_base_that_sends_other_replies_without_end_is_left():
    with talker(lambda _: itertools.repeat(Message("reply", 7))) as where:
        transport = transport_to(where, "tcp")
        transport.open()
        with pytest.raises(Disconnected, match=r"no answer in 0\.3 s"):
            transport.exchange(Message("hello", 1), 0.3)
        transport.close()


def test_a_base_that_says_that_it_is_busy_is_waited_for(monkeypatch, caplog):
    """By a clock that moves a second each time that somebody looks; nobody answers for 60 s."""
    seconds = itertools.count()
    monkeypatch.setattr(zeromq.time, "monotonic", lambda: float(next(seconds)))

    def answer(frames):
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
