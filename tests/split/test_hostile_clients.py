"""Whatever a client sends, it is told or dropped, and the others are answered as before."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pcg.errors import SplitError
from pcg.ir.types import TORCH_NAMES
from pcg.kernels.torch import host_kernels
from pcg.split.base.base_executor import BaseExecutor, GraphPieces
from pcg.split.base.base_loop import BaseLoop
from pcg.split.base.options import BaseOptions
from pcg.split.base.piece_rules import read_piece
from pcg.split.client.caller import Caller
from pcg.split.messages import (
    GRAPH,
    VERSION,
    Message,
    Piece,
    frames_of,
    graph_digest,
    header_of,
    read_message,
)
from pcg.split.zeromq import ZeroMqEndpoint, transport_to
from tests.support import compiled, oracle
from tests.support.families import BY_NAME
from tests.support.live_memory import peak_of
from tests.support.split_base import KEY, make_base
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
    def where(self):
        return self.loop.endpoint.where

    def answers(self):
        """Ask for a product; returns whether the answer is right."""
        (found,) = self.caller.call("run", (self.x,), piece=f"linear:{UP}").tensors
        return torch.allclose(found, self.y, atol=1e-5)


@contextmanager
def served(whole, transport="tcp", **options):
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
def raw(where, **options):
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


def reply_to(end, frames):
    end.send_multipart(frames)
    assert end.poll(30_000)
    return read_message(end.recv_multipart())


@pytest.mark.parametrize(("shape", "frame"), [([2**40], b""), ([2**70, 0], b""), ([2**62, 0], b"")])
def test_a_stranger_without_a_key_ends_no_base(whole, shape, frame):
    header = {"op": "hello", "seq": 1, "tensors": [["float64", shape]]}
    with served(whole) as base, raw(base.where) as end:
        assert reply_to(end, [json.dumps(header).encode(), frame]).op == "error"
        assert base.answers()


def test_what_a_transport_cannot_read_is_answered(whole, monkeypatch):
    def fail(*_):
        raise RuntimeError("what nobody has thought of")

    with served(whole) as base, raw(base.where) as end:
        with monkeypatch.context() as patch:
            patch.setattr(base.loop.endpoint, "_read", fail)
            assert "no message that a base can read" in reply_to(end, [b"{}"]).fields["error"]
        assert base.answers()


def test_an_empty_tensor_comes_back_through_shared_memory(whole):
    with served(whole, "shared-memory") as base:
        given = (torch.empty(0, 3), torch.ones(2))
        found = base.caller.call("echo", given).tensors
        assert [tuple(one.shape) for one in found] == [(0, 3), (2,)]
        assert base.answers()


def descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_headers_that_say_anything_are_refused_and_nothing_else_happens(whole):
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


@settings(max_examples=60, deadline=None)
@given(HEADERS, st.binary(max_size=64), st.integers(0, 3))
def test_no_header_is_an_error_of_ours(header, frame, count):
    texts = [json.dumps(header).encode(), frame]
    if isinstance(header, dict):
        extras = [{"tensors": header}, {"tensors": [header]}]
        texts += [json.dumps({**header, "op": "run", "seq": 1, **one}).encode() for one in extras]
    for text in texts:
        try:
            message = read_message([text, *[frame] * count])
        except SplitError:
            continue
        assert isinstance(message.op, str)
        assert len(message.tensors) == count


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 200), st.binary(min_size=1, max_size=4))
def test_a_header_with_other_bytes_in_it_is_a_message_or_refused(at, other):
    message = Message("run", 2, {"piece": f"linear:{UP}", "serves": True}, (torch.ones(2, 3),))
    text = header_of(message)
    at = min(at, len(text))
    try:
        found = read_message([text[:at] + other + text[at + len(other) :], bytes(24)])
    except SplitError:
        return
    assert sum(tensor.nbytes for tensor in found.tensors) == 24


def test_a_flood_of_tiny_requests_keeps_nobody_out(whole):
    tiny = [bytes(one) for one in frames_of(Message("stats", 2))]
    with served(whole) as base, raw(base.where, SNDHWM=100) as end:
        assert reply_to(end, [bytes(one) for one in frames_of(HELLO)]).op == "reply"
        stopped = threading.Event()
        sent = [0]

        def flood():
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


def test_a_client_that_reads_nothing_is_dropped(whole, caplog):
    """Its replies fill what the system keeps, then eight more; then it is gone, and its queue."""
    caplog.set_level("INFO", "pcg.split")
    x = torch.ones(2**13, 64)
    call = [bytes(one) for one in frames_of(Message("run", 2, {"piece": f"linear:{UP}"}, (x,)))]
    with served(whole) as base, raw(base.where, RCVHWM=1, SNDHWM=1, RCVBUF=4096) as end:
        end.send_multipart([bytes(one) for one in frames_of(HELLO)])
        until(lambda: base.loop.clients == 2)

        def is_dropped():
            if end.poll(10, zmq.POLLOUT):
                end.send_multipart(call)
            return bool(base.loop.clients == 1)

        until(is_dropped, 120)
        assert base.answers()
        assert "is gone" in caplog.text


def test_half_messages_and_what_is_no_zeromq_end_with_their_connection(whole):
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


def test_memory_that_is_shared_again_and_again_is_freed(whole):
    with served(whole, "shared-memory") as base, raw(base.where) as end:
        assert reply_to(end, [bytes(one) for one in frames_of(HELLO)]).op == "reply"
        share = [bytes(one) for one in frames_of(Message("share", 2, {"bytes": 2**20}))]
        assert reply_to(end, share).op == "reply"
        before = descriptors()
        for _ in range(50):
            assert reply_to(end, share).op == "reply"
        assert descriptors() <= before
        assert base.answers()


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_message_comes_back_as_it_was(dtype):
    tensors = (torch.randn(3, 4).to(dtype), torch.randn(4, 3).to(dtype).t(), torch.empty(0, 2))
    frames = frames_of(Message("run", 7, {"piece": "linear:ü"}, tensors))
    found = read_message([bytes(frame) for frame in frames])
    assert (found.op, found.seq, found.fields) == ("run", 7, {"piece": "linear:ü"})
    for one, other in zip(tensors, found.tensors, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_a_tensor_has_the_bytes_that_the_header_says():
    header = json.dumps({"op": "run", "seq": 1, "tensors": [["float32", [2]]]}).encode()
    with pytest.raises(SplitError, match="7 bytes are no tensor"):
        read_message([header, b"1234567"])
    with pytest.raises(SplitError, match="1 tensors, and 0 came"):
        read_message([header])


@pytest.mark.parametrize("text", ["", "linear", "linear:", "linear:a++b", "run:a", "gradient:a+b"])
def test_what_names_no_piece_is_refused(text):
    with pytest.raises(SplitError):
        Piece.parse(text)


def test_a_piece_is_written_as_it_is_read():
    for text in ("linear:a.weight+b.weight", "gradient:a.weight"):
        assert str(Piece.parse(text)) == text


WIDEST = 256
MATRIX = 'frozen %p0: f32[64, 64] = "model.layers.{layer}.q"'
RMS = "{eps=1e-06, offset=0.0, round_first=True}"


def graph(inputs, parameters, nodes, outputs):
    lines = [f"graph @piece({inputs}) {{"]
    lines += [f"  {one}" for one in (*parameters, *nodes)]
    return "\n".join([*lines, f"  return {outputs}", "}"])


def chain(sources):
    """A product by each of some weights, one after the other."""
    parameters = [f'frozen %p{n}: f32[64, 64] = "{one}"' for n, one in enumerate(sources)]
    nodes = [f"%v{n + 1}: f32[T, 64] = linear(%v{n}, %p{n})" for n in range(len(sources))]
    return graph("%v0: f32[T, 64]", parameters, nodes, f"%v{len(sources)}")


def unary(node, type_="f32[T, 64]", parameters=()):
    return graph(f"%v0: {type_}", list(parameters), [f"%v1: {type_} = {node}"], "%v1")


def pair(first, second, node):
    inputs = f"%v0: {first}, %v1: {second}"
    return graph(inputs, [], [f"%v2: {first} = {node}"], "%v2")


ROPE = "rope(%v0, %v1, %v1) {rotary_dim=ROWS, style=STYLE}"
HOSTILE = {
    "a matrix as a norm's weight": (unary(f"rms_norm(%v0, %p0) {RMS}", parameters=(MATRIX,)), None),
    "a norm that is wider than its type": (
        unary(f"rms_norm(%v0, %p0) {RMS}", "f32[T, 1]", (MATRIX,)),
        None,
    ),
    "a norm over tokens": (unary(f"rms_norm(%v0) {RMS}", "f32[T]"), None),
    "a gradient of a norm over others": (
        pair("f32[T, 64]", "f32[T, 1]", "rms_norm_backward(%v1, %v0) {eps=1e-06, offset=0.0}"),
        "no piece|does not take",
    ),
    "tokens by tokens": (pair("f32[T]", "f32[T, 1]", "clamp_backward(%v0, %v1) {min=0.0}"), None),
    "a gradient that is wider than its type": (
        pair("f32[T, 1]", "f32[T, 64]", "silu_backward(%v0, %v1)"),
        None,
    ),
    "turned dims that there are not": (
        pair("f32[T, 4, 2]", "f32[T, 64]", ROPE.replace("ROWS", "64").replace("STYLE", '"half"')),
        None,
    ),
    "a function of another name": (
        pair(
            "f32[T, 4, 64]",
            "f32[T, 64]",
            ROPE.replace("ROWS", "64").replace("STYLE", '"half_backward"'),
        ),
        "use numbers or words",
    ),
    "a value as a number": (
        pair("f32[T, 1]", "f32[T, 64]", 'clamp(%v0) {min="v1"}'),
        "use numbers or words",
    ),
    "an exponent that is a value": (unary('pow(%v0) {exponent="v0"}'), "use numbers or words"),
    "a type of 9 dims": (unary("silu(%v0)", "f32[T" + ", 1" * 8 + "]"), "types such as"),
    "one matrix by many names": (
        chain(["model.layers.{layer}.q"] * 3),
        "2 products of a kind by a matrix at most",
    ),
    "products by all layers": (
        chain([f"model.layers.{layer}.q" for layer in range(65)]),
        "64 products at most, not 65",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_node_that_its_type_says_nothing_true_of_is_refused(name):
    text, message = HOSTILE[name]
    with pytest.raises(
        SplitError, match=message or "this is no piece: .* (does not fit|norm of|takes)"
    ):
        read_piece(text, WIDEST)


def test_vectors_of_weights_are_counted_as_memory():
    scale = 'frozen %p0: f32[64] = "norm"'
    nodes = ['%v1: f64[64] = cast(%p0) {dtype="f64"}', "%v2: f64[T, 64] = mul(%v0, %v1)"]
    found = read_piece(graph("%v0: f64[T, 64]", [scale], nodes, "%v2"), WIDEST)
    kernels = 4 * 64 * 8
    assert found.bytes_per_token == 3 * 64 * 8 + kernels


ROTATED = ("bf16[T, 4, 64]", "bf16[T, 64]", "rope_backward(%v0, %v1, %v1) ")
EAGER = {
    "a norm's gradient": pair(
        "bf16[T, 64]", "bf16[T, 64]", "layer_norm_backward(%v0, %v1) {eps=1e-06}"
    ),
    "a norm": unary(f"rms_norm(%v0) {RMS}", "bf16[T, 64]"),
    "a rotation": pair(ROTATED[0], ROTATED[1], ROTATED[2] + '{rotary_dim=64, style="half"}'),
    "a bound": pair("f16[T, 64]", "f16[T, 64]", "clamp_backward(%v0, %v1) {max=1.0, min=0.0}"),
}


@pytest.mark.parametrize("text", EAGER.values(), ids=EAGER)
def test_what_kernels_allocate_is_counted(text, monkeypatch):
    monkeypatch.setattr(host_kernels, "_is_read", lambda x: False)  # native norms need less
    graphs, tokens = GraphPieces({}, WIDEST, layers=1), 32
    piece = Piece(GRAPH, (graphs.define(b"a", text),))
    wanted = read_piece(text, WIDEST)
    inputs = [
        torch.rand(tokens, *one.type.features, dtype=getattr(torch, TORCH_NAMES[one.type.dtype]))
        for one in wanted.graph.inputs
    ]
    graphs.checked(b"a", piece, inputs)
    sent = sum(one.nbytes for one in inputs)
    peak = sent + peak_of(lambda: graphs.run(piece, inputs))
    assert peak <= tokens * wanted.bytes_per_token
    assert peak > tokens * wanted.bytes_per_token / 4


def found_bytes(text):
    return read_piece(text, WIDEST).bytes_per_token


def test_weights_of_no_layer_are_bound_once():
    tensors = {"model.layers.0.q": torch.randn(64, 64)}
    graphs = GraphPieces(tensors, WIDEST, layers=100)
    digest = graphs.define(b"a", chain(["model.layers.0.q"]))
    x = torch.randn(2, 64)
    for layer in range(100):
        piece = Piece(GRAPH, (digest,), layer)
        graphs.checked(b"a", piece, [x])
        (found,) = graphs.run(piece, [x])
        torch.testing.assert_close(found, x @ tensors["model.layers.0.q"].t())
    assert len(graphs._defined[digest].layers) == 1


def test_a_batch_of_a_graph_has_no_more_memory_than_a_request():
    whole = compiled.executor(oracle.random_model(BY_NAME["llama3"].config(1)))
    base = make_base(whole, max_piece_mib=1)
    text = unary("silu(%v0)")
    most = 2**20 // found_bytes(text)
    clients = [base.endpoint.join() for _ in range(3)]
    for client, _ in clients:
        base.endpoint.ask(client, Message("hello", 1, {"version": VERSION, "key": KEY}))
        base.endpoint.ask(client, Message("define", 2, {"text": text}))
    base.loop.step(0.0)
    digest = graph_digest(text)
    for client, _ in clients:
        x = torch.ones(most // 2, 64)
        base.endpoint.ask(client, Message("run", 3, {"piece": f"graph:{digest}@0"}, (x,)))
    while base.loop.counts.requests < 3:
        base.loop.step(0.0)
    assert base.loop.counts.batches == 2
