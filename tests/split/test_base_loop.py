"""A base refuses what does not fit, bounds what waits, and forgets clients that are gone."""

import logging
import threading

import pytest
import torch

from pcg.errors import BaseBusyError, ServeError, SplitError
from pcg.split.base.base_executor import BaseExecutor
from pcg.split.base.base_loop import BaseLoop, LimitedLog, Setbacks
from pcg.split.base.options import BaseOptions
from pcg.split.client.caller import Caller
from pcg.split.messages import VERSION, Message, failure
from pcg.split.transport import Transport
from tests.support import serving
from tests.support.families import BY_NAME
from tests.support.in_process import InProcessEndpoint
from tests.support.split_base import KEY, Base, make_base, running_base
from tests.support.waiting import until

CONFIG = BY_NAME["llama3"].config(1)
Q = "model.layers.0.self_attn.q_proj.weight"
O = "model.layers.0.self_attn.o_proj.weight"  # noqa: E741
HELLO = {"version": VERSION, "key": KEY}


def ask(base, client, message):
    base.endpoint.ask(client[0], message)
    base.loop.step(0)
    return None if client[1].empty() else client[1].get_nowait()


def joined(base, key=KEY):
    client = base.endpoint.join()
    reply = ask(base, client, Message("hello", 1, {"version": VERSION, "key": key}))
    assert reply.op == "reply", reply.fields
    return client


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 0}, f"version {VERSION} of the messages, and the client version 0"),
        ({"key": "another-key"}, "the key is none"),
        ({"key": 7}, "the key is none"),
        ({"config": {**CONFIG, "hidden_size": 32}}, "hidden_size=32, not 64"),
        ({"dtype": "bfloat16"}, "dtype bfloat16, and this base has float32"),
        ({"digest": "f00"}, "digest f00"),
    ],
)
def test_a_client_that_does_not_fit_is_refused(whole, changes, message):
    base = make_base(whole)
    reply = ask(base, base.endpoint.join(), Message("hello", 1, {**HELLO, **changes}))
    assert reply.op == "error"
    assert message in reply.fields["error"]
    assert base.loop.clients == 0


def test_nobody_is_answered_before_hello(whole):
    base = make_base(whole)
    message = Message("fetch", 1, {"name": "model.embed_tokens.weight"})
    reply = ask(base, base.endpoint.join(), message)
    assert "say hello first" in reply.fields["error"]


@pytest.mark.parametrize(
    ("op", "fields", "tensors", "message"),
    [
        ("run", {"piece": f"linear:{Q}"}, (torch.ones(2, 7),), "takes one tensor [tokens, 64]"),
        ("run", {"piece": f"linear:{Q}"}, (), "not none"),
        ("run", {"piece": f"linear:{Q}"}, (torch.ones(0, 64),), "no tokens"),
        ("run", {"piece": f"linear:{Q}"}, (torch.ones(2, 64).half(),), "torch.float16"),
        ("run", {"piece": "linear:nothing"}, (torch.ones(2, 64),), "'nothing' is no weight"),
        ("run", {"piece": 5}, (torch.ones(2, 64),), "needs 'piece'"),
        ("fetch", {"name": Q}, (), "stays at the base"),
        ("fetch", {"name": "nothing"}, (), "no tensor 'nothing'"),
        ("rows", {"name": Q, "begin": 1, "end": 2}, (), "its weights be downloaded"),
        ("lengths", {"name": "nothing"}, (), "no weight"),
        ("share", {"bytes": 4096}, (), "shares no memory"),
        ("eval", {}, (), "'eval' is nothing that a base does"),
    ],
)
def test_what_a_base_does_not_do_is_refused(whole, op, fields, tensors, message):
    base = make_base(whole)
    reply = ask(base, joined(base), Message(op, 2, fields, tensors))
    assert (reply.op, reply.seq) == ("error", 2)
    assert message in reply.fields["error"]
    assert base.loop.waiting == 0


def test_requests_of_clients_run_as_one_and_each_gets_its_own_rows(whole):
    base = make_base(whole)
    clients = [joined(base) for _ in range(3)]
    weight = base.loop.base.multiplied[O]
    inputs = [torch.randn(tokens, 64) for tokens in (1, 5, 2)]
    for (name, _), x in zip(clients, inputs, strict=True):
        base.endpoint.ask(name, Message("run", 2, {"piece": f"linear:{O}"}, (x,)))
    base.loop.step(0)
    assert (base.loop.counts.batches, base.loop.counts.tokens) == (1, 8)
    for (_, replies), x in zip(clients, inputs, strict=True):
        (y,) = replies.get_nowait().tensors
        assert torch.allclose(y, x @ weight.t(), atol=1e-5)


def test_a_base_that_computes_greets_others_and_says_that_it_is_busy(whole, monkeypatch):
    is_over, run = threading.Event(), BaseExecutor.run

    def slow(base, piece, inputs):
        assert is_over.wait(60)
        return run(base, piece, inputs)

    monkeypatch.setattr(BaseExecutor, "run", slow)
    call = Message("run", 2, {"piece": f"linear:{O}"}, (torch.ones(1, 64),))
    with running_base(whole, policy="none") as base:
        first, second, third = (base.endpoint.join() for _ in range(3))
        for name, replies in (first, second, third):
            base.endpoint.ask(name, Message("hello", 1, HELLO))
            assert replies.get(timeout=60).op == "reply"
            base.endpoint.ask(name, call)
            if name == first[0]:
                until(lambda: not base.loop.waiting)
        for _, replies in (first, second):  # one of which runs, and the other waits for it
            for _ in range(3):
                busy = replies.get(timeout=60)
                assert (busy.op, busy.seq) == ("busy", 2)
                assert 0 < busy.fields["requests"] <= 3
        base.endpoint.ask(first[0], Message("stats", 3))
        base.endpoint.ask(first[0], Message("lengths", 4, {"name": O}))
        base.endpoint.leave(third[0])
        until(lambda: base.loop.clients == 2)
        is_over.set()
        for (_, replies), last in ((first, {2, 3, 4}), (second, {2})):
            found = iter(lambda: replies.get(timeout=60), None)  # noqa: B023
            answers = set()
            while answers < last:
                answers |= {one.seq for one in (next(found),) if one.op == "reply"}
    assert base.loop.counts.requests == 2
    assert base.loop.counts.dropped == 1


def test_a_result_of_other_rows_is_an_error_and_ends_nothing(whole, monkeypatch):
    base = make_base(whole)
    client = joined(base)
    call = Message("run", 2, {"piece": f"linear:{O}"}, (torch.ones(1, 64),))
    with monkeypatch.context() as patch:
        patch.setattr(base.loop.base, "run", lambda *_: (torch.ones(64, 64),))
        assert "the base failed" in ask(base, client, call).fields["error"]
    assert ask(base, client, call).op == "reply"


def test_a_client_takes_no_product_of_another_shape(whole, monkeypatch):
    with running_base(whole) as base, base.connect(cut="linear") as split:
        monkeypatch.setattr(base.loop.base, "run", lambda _, x: (x[0][:, :1],))
        with pytest.raises(SplitError, match=r"and not with \[3, \d+\] of torch.float32"):
            split.logits([1, 2, 3])


def test_a_client_that_is_gone_frees_its_queue(whole):
    base = make_base(whole, policy="lockstep")
    first, second = joined(base), joined(base)
    call = Message("run", 2, {"piece": f"linear:{O}"}, (torch.ones(1, 64),))
    for name, _ in (first, second):  # now both are waited for
        base.endpoint.ask(name, call)
    base.loop.step(0)
    base.endpoint.ask(first[0], call)
    base.loop.step(0)
    assert base.loop.waiting == 1
    base.endpoint.leave(first[0])
    base.loop.step(0)
    assert (base.loop.waiting, base.loop.clients, base.loop.counts.dropped) == (0, 1, 1)


def test_a_client_has_a_bound_on_what_waits(whole):
    base = make_base(whole, policy="lockstep")
    first, second = joined(base), joined(base)
    call = Message("run", 2, {"piece": f"linear:{O}"}, (torch.ones(1, 64),))
    for name, _ in (first, second):
        base.endpoint.ask(name, call)
    base.loop.step(0)
    for _ in range(70):
        base.endpoint.ask(first[0], call)
    base.loop.step(0)
    assert base.loop.waiting == 64


def test_a_base_that_drains_takes_no_new_clients_and_ends_with_its_last(whole):
    base = make_base(whole)
    name, _ = joined(base)
    base.loop.drain()
    reply = ask(base, base.endpoint.join(), Message("hello", 1, HELLO))
    assert "takes no new clients" in reply.fields["error"]
    base.endpoint.ask(name, Message("bye", 2))
    base.loop.run()  # returns
    assert base.loop.clients == 0


def test_options_out_of_range_are_refused():
    for wrong in ({"wait_ms": -1}, {"policy": "all"}, {"port": 70000}):
        with pytest.raises(SplitError):
            BaseOptions(**wrong)


def test_a_closed_client_and_matrices_that_stay_at_the_base_are_errors(whole):
    with running_base(whole) as base:
        with base.connect() as split:
            assert isinstance(split.caller, Caller)
            weight = split.state.weight_store.linear()["model.layers.0.self_attn.q_proj"]
            with pytest.raises(TypeError, match="meta"):
                weight.numpy()
        with pytest.raises(SplitError, match="was closed"):
            split.generate([[5, 6]], max_new_tokens=2)


def keys_file(folder):
    scopes = {"serves": ["infer"], "trains": ["train"], "reads": ["metrics"]}
    return serving.keys_file(folder, **{name: {"scopes": one} for name, one in scopes.items()})


def base_with(whole, **options):
    endpoint = InProcessEndpoint()
    return Base(BaseLoop(BaseExecutor(whole), endpoint, BaseOptions(**options)), endpoint)


def call(tokens):
    return Message("run", 2, {"piece": f"linear:{O}"}, (torch.ones(tokens, 64),))


def test_a_file_of_keys_says_who_may_serve_and_train(whole, tmp_path):
    base = base_with(whole, api_keys=keys_file(tmp_path), policy="none")
    gradient = Message("run", 3, {"piece": f"gradient:{O}"}, (torch.ones(1, 64),))
    for key, op in (("key-of-serves", "error"), ("key-of-trains", "reply")):
        reply = ask(base, joined(base, key), gradient)
        assert reply.op == op
    client = base.endpoint.join()
    reply = ask(base, client, Message("hello", 1, {"version": VERSION, "key": "key-of-reads"}))
    assert "has neither of the scopes infer and train" in reply.fields["error"]
    with pytest.raises(ServeError, match="at least 8"):
        base_with(whole, api_key=("short",))


def test_a_key_has_bounds_on_what_waits(whole, tmp_path):
    """With lockstep and a third client that is waited for, all requests wait."""
    base = base_with(
        whole, api_key=(KEY,), api_keys=keys_file(tmp_path), policy="lockstep", key_tokens=6
    )
    one, two, other, late = (
        *(joined(base) for _ in range(2)),
        joined(base, "key-of-trains"),
        joined(base),
    )
    for client in (one, two, other, late):
        base.endpoint.ask(client[0], call(1))
    base.loop.step(0)
    for client in (one, two, other, late):
        client[1].get_nowait()
    assert ask(base, one, call(4)) is None
    busy = ask(base, two, call(3))
    assert busy.fields["kind"] == "BaseBusyError"
    assert "4 tokens" in busy.fields["error"]
    assert ask(base, other, call(3)) is None  # another key's
    assert ask(base, two, call(2)) is None
    assert base.loop.waiting == 3
    never = ask(base, late, call(7))
    assert never.fields["kind"] == "SplitError"
    assert "send fewer tokens" in never.fields["error"]


FACTS = {
    **dict.fromkeys(("name", "digest", "instance"), "x"),
    "device": "CPU",
    "rates": None,
    "most_bytes": 2**20,
    **{name: {} for name in ("config", "fetched", "digests", "files")},
    "pieces": {"x": [2, 3]},
    "dtype": "float32",
    "graphs": True,
    "rows": False,
    "absent": [],
}


class _Busy(Transport):
    """A base that is busy a few times."""

    where = "nowhere"

    def __init__(self, times):
        self.left = times
        self.asked = []

    def open(self): ...

    def close(self): ...

    def exchange(self, message, timeout_s):
        if message.op == "hello":
            return Message("reply", message.seq, FACTS)
        self.asked.append(message)
        self.left -= 1
        if self.left >= 0:
            return failure(message.seq, BaseBusyError("6 tokens wait"))
        return Message("reply", message.seq)


def test_a_call_is_made_again_while_the_base_is_busy():
    transport = _Busy(3)
    caller = Caller(transport, {}, lost_s=60)
    caller.call("run", (torch.ones(1),), piece="x")
    assert len(transport.asked) == 4
    assert all(one is transport.asked[0] for one in transport.asked)
    assert caller.moved.calls == 1
    never = Caller(_Busy(10**9), {}, lost_s=0.05)
    with pytest.raises(SplitError, match="6 tokens wait"):
        never.call("run", (torch.ones(1),), piece="x")


def test_each_wrong_key_makes_its_address_wait_twice_as_long():
    wrong, now_s, waits = Setbacks(), 100.0, []
    for _ in range(8):
        wrong.note("a", now_s)
        waits.append(wrong.wait_s("a", now_s))
        now_s += waits[-1]
        assert wrong.wait_s("a", now_s) == 0
    assert waits == [0.25, 0.5, 1, 2, 4, 8, 8, 8]
    assert wrong.wait_s("b", now_s) == 0
    wrong.note("a", now_s + 100)
    assert wrong.wait_s("a", now_s + 100) == 0.25
    for index in range(5000):
        wrong.note(str(index), now_s + 100)
    assert wrong.wait_s("a", now_s + 100) == 0  # the oldest are forgotten: memory has a bound
    assert wrong.wait_s("4999", now_s + 100) == 0.25


def test_a_right_key_behind_wrong_ones_is_looked_at_later(whole):
    base = make_base(whole, policy="none")
    here = joined(base)
    bad = ask(
        base, base.endpoint.join(), Message("hello", 1, {"version": VERSION, "key": "guessed-1"})
    )
    assert "the key is none" in bad.fields["error"]
    client = base.endpoint.join()
    good = Message("hello", 1, {"version": VERSION, "key": KEY})
    assert ask(base, client, good) is None  # not looked at yet
    again = ask(base, client, good)
    assert "too many wrong keys" in again.fields["error"]
    assert ask(base, here, call(1)) is not None  # who is in already has nothing to wait for

    def is_answered():
        base.loop.step(0)
        return not client[1].empty()

    until(is_answered)
    assert client[1].get_nowait().op == "reply"
    assert base.loop.clients == 2


def test_a_refused_graph_makes_its_key_wait_before_the_next(whole):
    base = make_base(whole)
    client = joined(base)
    texts = ["no graph", "none either"]
    refused = [ask(base, client, Message("define", 2, {"text": text})) for text in texts]
    assert "this is no piece" in refused[0].fields["error"]
    assert refused[1] is not None  # not looked at: a client asks again
    assert refused[1].fields["kind"] == "BaseBusyError"
    assert ask(base, client, call(1)) is not None  # nothing else waits

    def is_looked_at():
        reply = ask(base, client, Message("define", 2, {"text": texts[1]}))
        return reply is not None and "this is no piece" in reply.fields["error"]

    until(is_looked_at)


def test_clients_cannot_fill_the_log(caplog):
    log = LimitedLog(logging.getLogger("pcg.split"))
    with caplog.at_level(logging.INFO, "pcg.split"):
        for number in range(10_000):
            log.say(logging.INFO, "line %d", number)
        said = len(caplog.records)
        assert 50 <= said < 9_000
        until(lambda: log.say(logging.INFO, "later") or log.left_out == 0)
    assert "lines before it are left out" in caplog.text
