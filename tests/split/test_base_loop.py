"""A base refuses what does not fit, by name, and forgets clients that are gone."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from pcg.errors import SplitError
from pcg.runtime.executor import Executor
from pcg.split.base.base_executor import BaseExecutor
from pcg.split.base.options import BaseOptions
from pcg.split.client.caller import Caller
from pcg.split.messages import VERSION, Message, Piece
from tests.support.families import BY_NAME
from tests.support.split_base import KEY, Base, make_base, running_base
from tests.support.waiting import until

CONFIG = BY_NAME["llama3"].config(1)
Q = "model.layers.0.self_attn.q_proj.weight"
O = "model.layers.0.self_attn.o_proj.weight"  # noqa: E741
HELLO = {"version": VERSION, "key": KEY}


def ask(base: Base, client: Any, message: Message) -> Message:
    """A client's message, and its answer in the same step."""
    name, replies = client
    base.endpoint.ask(name, message)
    base.loop.step(0)
    return replies.get_nowait()  # type: ignore[no-any-return]


def joined(base: Base) -> Any:
    client = base.endpoint.join()
    assert ask(base, client, Message("hello", 1, HELLO)).op == "reply"
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
def test_a_client_that_does_not_fit_is_refused(
    whole: Executor, changes: dict[str, Any], message: str
) -> None:
    base = make_base(whole)
    reply = ask(base, base.endpoint.join(), Message("hello", 1, {**HELLO, **changes}))
    assert reply.op == "error"
    assert message in reply.fields["error"]
    assert base.loop.clients == 0


def test_nobody_is_answered_before_hello(whole: Executor) -> None:
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
def test_what_a_base_does_not_do_is_refused(
    whole: Executor, op: str, fields: dict[str, Any], tensors: Any, message: str
) -> None:
    base = make_base(whole)
    reply = ask(base, joined(base), Message(op, 2, fields, tensors))
    assert (reply.op, reply.seq) == ("error", 2)
    assert message in reply.fields["error"]
    assert base.loop.waiting == 0


def test_requests_of_clients_run_as_one_and_each_gets_its_own_rows(whole: Executor) -> None:
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


def test_a_base_that_computes_greets_others_and_says_that_it_is_busy(
    whole: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over, run = threading.Event(), BaseExecutor.run

    def slow(base: BaseExecutor, piece: Piece, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
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
            answers: set[int] = set()
            while answers < last:
                answers |= {one.seq for one in (next(found),) if one.op == "reply"}
    assert base.loop.counts.requests == 2
    assert base.loop.counts.dropped == 1


def test_a_result_of_other_rows_is_an_error_and_ends_nothing(
    whole: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = make_base(whole)
    client = joined(base)
    call = Message("run", 2, {"piece": f"linear:{O}"}, (torch.ones(1, 64),))
    with monkeypatch.context() as patch:
        patch.setattr(base.loop.base, "run", lambda *_: (torch.ones(64, 64),))
        assert "the base failed" in ask(base, client, call).fields["error"]
    assert ask(base, client, call).op == "reply"


def test_a_client_takes_no_product_of_another_shape(
    whole: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_base(whole) as base, base.connect(cut="linear") as split:
        monkeypatch.setattr(base.loop.base, "run", lambda _, x: (x[0][:, :1],))
        with pytest.raises(SplitError, match=r"and not with \[3, \d+\] of torch.float32"):
            split.logits([1, 2, 3])


def test_a_client_whose_reply_cannot_be_written_is_dropped(
    whole: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = make_base(whole)
    client = joined(base)

    def fail(*_: object) -> bool:
        raise ValueError("what nobody has thought of")

    monkeypatch.setattr(base.endpoint, "send", fail)
    base.endpoint.ask(client[0], Message("stats", 2))
    base.loop.step(0)
    assert base.loop.clients == 0


def test_a_client_that_is_gone_frees_its_queue(whole: Executor) -> None:
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


def test_a_client_has_a_bound_on_what_waits(whole: Executor) -> None:
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


def test_a_base_that_drains_takes_no_new_clients_and_ends_with_its_last(whole: Executor) -> None:
    base = make_base(whole)
    name, _ = joined(base)
    base.loop.drain()
    reply = ask(base, base.endpoint.join(), Message("hello", 1, HELLO))
    assert "takes no new clients" in reply.fields["error"]
    base.endpoint.ask(name, Message("bye", 2))
    base.loop.run()  # returns
    assert base.loop.clients == 0


def test_options_out_of_range_are_refused() -> None:
    for wrong in ({"wait_ms": -1}, {"policy": "all"}, {"port": 70000}):
        with pytest.raises(SplitError):
            BaseOptions(**wrong)  # type: ignore[arg-type]


def test_a_closed_client_and_matrices_that_stay_at_the_base_are_errors(whole: Executor) -> None:
    with running_base(whole) as base:
        with base.connect() as split:
            assert isinstance(split.caller, Caller)
            weight = split.state.weight_store.linear()["model.layers.0.self_attn.q_proj"]
            with pytest.raises(TypeError, match="meta"):
                weight.numpy()
        with pytest.raises(SplitError, match="was closed"):
            split.generate([[5, 6]], max_new_tokens=2)
