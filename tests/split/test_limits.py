"""A key has bounds on what waits, and who tries keys waits longer each time."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from pcg.errors import BaseBusyError, ServeError, SplitError
from pcg.runtime.executor import Executor
from pcg.split.base.base_executor import BaseExecutor
from pcg.split.base.base_loop import BaseLoop, LimitedLog, Setbacks
from pcg.split.base.options import BaseOptions
from pcg.split.client.caller import Caller
from pcg.split.messages import VERSION, Message, failure
from pcg.split.transport import Transport
from tests.support.in_process import InProcessEndpoint
from tests.support.split_base import KEY, Base, make_base
from tests.support.waiting import until

O = "model.layers.0.self_attn.o_proj.weight"  # noqa: E741


def keys_file(folder: Path) -> Path:
    entries = [
        {
            "name": name,
            "sha256": hashlib.sha256(f"key-of-{name}".encode()).hexdigest(),
            "scopes": scopes,
        }
        for name, scopes in (("serves", ["infer"]), ("trains", ["train"]), ("reads", ["metrics"]))
    ]
    path = folder / "keys.json"
    path.write_text(json.dumps(entries), encoding="utf-8")
    return path


def base_with(whole: Executor, **options: Any) -> Base:
    endpoint = InProcessEndpoint()
    return Base(BaseLoop(BaseExecutor(whole), endpoint, BaseOptions(**options)), endpoint)


def ask(base: Base, client: Any, message: Message) -> Message | None:
    base.endpoint.ask(client[0], message)
    base.loop.step(0)
    return None if client[1].empty() else client[1].get_nowait()


def joined(base: Base, key: str = KEY) -> Any:
    client = base.endpoint.join()
    reply = ask(base, client, Message("hello", 1, {"version": VERSION, "key": key}))
    assert reply is not None
    assert reply.op == "reply", reply.fields
    return client


def call(tokens: int) -> Message:
    return Message("run", 2, {"piece": f"linear:{O}"}, (torch.ones(tokens, 64),))


def test_a_file_of_keys_says_who_may_serve_and_train(whole: Executor, tmp_path: Path) -> None:
    base = base_with(whole, api_keys=keys_file(tmp_path), policy="none")
    gradient = Message("run", 3, {"piece": f"gradient:{O}"}, (torch.ones(1, 64),))
    for key, op in (("key-of-serves", "error"), ("key-of-trains", "reply")):
        reply = ask(base, joined(base, key), gradient)
        assert reply is not None
        assert reply.op == op
    client = base.endpoint.join()
    reply = ask(base, client, Message("hello", 1, {"version": VERSION, "key": "key-of-reads"}))
    assert reply is not None
    assert "has neither of the scopes infer and train" in reply.fields["error"]
    with pytest.raises(ServeError, match="at least 8"):
        base_with(whole, api_key=("short",))


def test_a_key_has_bounds_on_what_waits(whole: Executor, tmp_path: Path) -> None:
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
    assert busy is not None
    assert busy.fields["kind"] == "BaseBusyError"
    assert "4 tokens" in busy.fields["error"]
    assert ask(base, other, call(3)) is None  # another key's
    assert ask(base, two, call(2)) is None
    assert base.loop.waiting == 3
    never = ask(base, late, call(7))
    assert never is not None
    assert never.fields["kind"] == "SplitError"
    assert "send fewer tokens" in never.fields["error"]


FACTS: dict[str, Any] = {
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

    def __init__(self, times: int) -> None:
        self.left = times
        self.asked: list[Message] = []

    def open(self) -> None: ...

    def close(self) -> None: ...

    def exchange(self, message: Message, timeout_s: float) -> Message:
        if message.op == "hello":
            return Message("reply", message.seq, FACTS)
        self.asked.append(message)
        self.left -= 1
        if self.left >= 0:
            return failure(message.seq, BaseBusyError("6 tokens wait"))
        return Message("reply", message.seq)


def test_a_call_is_made_again_while_the_base_is_busy() -> None:
    transport = _Busy(3)
    caller = Caller(transport, {}, lost_s=60)
    caller.call("run", (torch.ones(1),), piece="x")
    assert len(transport.asked) == 4
    assert all(one is transport.asked[0] for one in transport.asked)
    assert caller.moved.calls == 1
    never = Caller(_Busy(10**9), {}, lost_s=0.05)
    with pytest.raises(SplitError, match="6 tokens wait"):
        never.call("run", (torch.ones(1),), piece="x")


def test_each_wrong_key_makes_its_address_wait_twice_as_long() -> None:
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


def test_a_right_key_behind_wrong_ones_is_looked_at_later(whole: Executor) -> None:
    base = make_base(whole, policy="none")
    here = joined(base)
    bad = ask(
        base, base.endpoint.join(), Message("hello", 1, {"version": VERSION, "key": "guessed-1"})
    )
    assert bad is not None
    assert "the key is none" in bad.fields["error"]
    client = base.endpoint.join()
    good = Message("hello", 1, {"version": VERSION, "key": KEY})
    assert ask(base, client, good) is None  # not looked at yet
    again = ask(base, client, good)
    assert again is not None
    assert "too many wrong keys" in again.fields["error"]
    assert ask(base, here, call(1)) is not None  # who is in already has nothing to wait for

    def is_answered() -> bool:
        base.loop.step(0)
        return not client[1].empty()

    until(is_answered)
    assert client[1].get_nowait().op == "reply"
    assert base.loop.clients == 2


def test_a_refused_graph_makes_its_key_wait_before_the_next(whole: Executor) -> None:
    base = make_base(whole)
    client = joined(base)
    texts = ["no graph", "none either"]
    refused = [ask(base, client, Message("define", 2, {"text": text})) for text in texts]
    assert refused[0] is not None
    assert "this is no piece" in refused[0].fields["error"]
    assert refused[1] is not None  # not looked at: a client asks again
    assert refused[1].fields["kind"] == "BaseBusyError"
    assert ask(base, client, call(1)) is not None  # nothing else waits

    def is_looked_at() -> bool:
        reply = ask(base, client, Message("define", 2, {"text": texts[1]}))
        return reply is not None and "this is no piece" in reply.fields["error"]

    until(is_looked_at)


def test_clients_cannot_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    log = LimitedLog(logging.getLogger("pcg.split"))
    with caplog.at_level(logging.INFO, "pcg.split"):
        for number in range(10_000):
            log.say(logging.INFO, "line %d", number)
        said = len(caplog.records)
        assert 50 <= said < 9_000
        until(lambda: log.say(logging.INFO, "later") or log.left_out == 0)
    assert "lines before it are left out" in caplog.text
