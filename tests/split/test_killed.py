"""kill -9 of a base or a client at any moment: nothing is lost, left, or computed otherwise."""

import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import equal

import pcg
from pcg.errors import BaseLostError
from pcg.runtime.data.example import Example
from pcg.split.base.base_executor import BaseExecutor
from pcg.split.base.base_loop import BaseLoop
from pcg.split.base.options import BaseOptions
from pcg.split.client.connect import connect
from pcg.split.client.noise import Privacy
from pcg.split.messages import GRADIENT
from pcg.split.zeromq import ZeroMqEndpoint
from tests.support import serving
from tests.support.split_base import KEY, base_process
from tests.support.text_model import ROWS as TEXT_ROWS
from tests.support.waiting import until

pytest.importorskip("zmq")
ROWS = [Example(one, one) for one in ([3, 4, 5, 6, 7, 8], [9, 3, 5])]
JOB = {"adapter": "x", "max_steps": 2, "batch_size": 2, "learning_rate": 1e-2}
LORA = pcg.LoraConfig(r=4, target_modules="all-linear")
CHILD = """
import sys, time
import torch
import pcg
from pcg.runtime.data.example import Example
from pcg.split.client.caller import Caller
from pcg.split.messages import Message, frames_of
from pcg.split.zeromq import transport_to

what, where, transport, key, piece, width = sys.argv[1:]
if what == "trains":
    rows = [Example(one, one) for one in ([3, 4, 5, 6, 7, 8], [9, 3, 5])]
    client = pcg.connect(where, api_key=key, transport=transport, peft={"y": "lora"})
    client.finetune(rows, adapter="y", max_steps=10**6, batch_size=2, learning_rate=1e-3)
caller = Caller(transport_to(where, transport), {"key": key}, connect_s=120)
if what == "idle":
    print("here", flush=True)
    time.sleep(600)
x = torch.ones(2**15 if what == "sends" else 5, int(width))
while True:
    caller.call("run", (x,), piece=piece)
"""


class Held:
    """A base whose products wait while `gate` is closed.

    Attributes:
        ran: the pieces that it was asked for, and their tokens.
    """

    def __init__(self, whole):
        self.endpoint = ZeroMqEndpoint("127.0.0.1", 0, 2**26)
        base = BaseExecutor(whole)
        self.loop = BaseLoop(base, self.endpoint, BaseOptions(api_key=(KEY,)))
        self.gate, self.entered = threading.Event(), threading.Event()
        self.ran = []
        self.holds = lambda _, tokens: False
        self._run = base.run
        base.run = self.run
        self.thread = threading.Thread(target=self.loop.run)
        self.thread.start()

    def run(self, piece, inputs):
        tokens = len(inputs[0])
        self.ran.append((piece, tokens))
        if self.holds(piece, tokens):
            self.entered.set()
            assert self.gate.wait(120)
        return self._run(piece, inputs)

    def close(self):
        self.gate.set()
        self.loop.stop()
        self.thread.join(60)
        self.endpoint.close()


@pytest.fixture(scope="module")
def whole():
    return pcg.compile(serving.model_directory(), peft={"x": LORA})


@pytest.fixture
def held(whole):
    base = Held(whole)
    yield base
    base.close()


@contextmanager
def killed(held, what, transport, piece):
    """A process that does something to a base; yields what kills it."""
    width = held.loop.base.multiplied[piece.partition(":")[2]].shape[1]
    where = held.endpoint.where
    arguments = [what, where, transport, KEY, piece, str(width)]
    command = [sys.executable, "-c", CHILD, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:

        def kill():
            child.kill()
            child.wait(30)

        try:
            yield kill
        finally:
            kill()


def results(client):
    """Greedy tokens, and an adapter that is trained anew."""
    done = client.generate([[5, 6, 7], [8, 9]], max_new_tokens=4, temperature=0)
    client.state.remove_adapter("x")
    client.add_adapter("x", LORA, seed=3)
    client.finetune(ROWS, **JOB)
    return [one.token_ids for one in done], [one.clone() for one in client.adapters["x"].tensors]


def descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


STATES = {
    "idle": ("idle", lambda piece, tokens: False),
    "while it sends": ("sends", lambda piece, tokens: False),
    "in the queue": ("asks", lambda piece, tokens: tokens != 5),
    "during a product": ("asks", lambda piece, tokens: tokens == 5),
    "in a finetuning step": ("trains", lambda piece, tokens: piece.kind == GRADIENT),
}


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["tcp", "shared-memory"])
@pytest.mark.parametrize("state", STATES)
def test_nothing_of_a_killed_client_is_left(held, caplog, state, transport):
    caplog.set_level("INFO", "pcg.split")
    what, holds = STATES[state]
    piece = f"linear:{next(iter(held.loop.base.multiplied))}"
    with connect(held.endpoint.where, api_key=KEY, transport=transport, peft={"x": LORA}) as client:
        tokens, trained = results(client)
        before = descriptors()
        with killed(held, what, transport, piece) as kill:
            until(lambda: held.loop.clients == 2, 120)
            if state == "in the queue":
                # The other's product is held while the child's request comes.
                held.holds = holds
                found = []
                other = threading.Thread(target=lambda: found.append(results(client)))
                other.start()
                until(held.entered.is_set)
                kill()
                held.gate.set()
                other.join(120)
                assert found[0][0] == tokens
                assert all(map(torch.equal, found[0][1], trained))
            elif state in ("during a product", "in a finetuning step"):
                held.holds = holds
                until(held.entered.is_set, 120)
                kill()
                held.gate.set()
            else:
                asked = len(held.ran)
                until(lambda: state == "idle" or len(held.ran) > asked + 1)
                kill()
            until(lambda: held.loop.clients == 1)
        again, adapter = results(client)
        assert again == tokens
        assert all(map(torch.equal, adapter, trained))
        assert held.loop.waiting == 0
        until(lambda: descriptors() <= before)
        assert "is gone" in caplog.text


pytest.importorskip("zmq")
LONG_JOB = {"adapter": "x", "max_steps": 4, "batch_size": 2, "learning_rate": 1e-2}
TOKENS = {"max_new_tokens": 8, "temperature": 0}


def sampled(client):
    """An adapter that is trained anew, and greedy tokens by it."""
    client.state.remove_adapter("x")
    client.add_adapter("x", LORA, seed=3)
    client.finetune(TEXT_ROWS, **LONG_JOB)
    done = client.generate("Hello, how", "x", **TOKENS)
    return done.token_ids, [one.clone() for one in client.adapters["x"].tensors]


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["tcp", "shared-memory"])
def test_steps_and_tokens_repeat_exactly_at_a_base_that_is_new(transport):
    """The base is killed early and late in forward, in backward, and while tokens are decoded."""
    with base_process() as base:
        port = base.where.rpartition(":")[2]
        options = {"api_key": KEY, "transport": transport, "peft": {"x": LORA}}
        client = connect(base.where, lost_s=240, **options)
        calls = client.caller.moved.calls
        tokens, trained = sampled(client)
        calls = client.caller.moved.calls - calls
        found = []
        thread = threading.Thread(target=lambda: found.append(sampled(client)))
        begun = client.caller.moved.calls
        thread.start()
        until(lambda: client.caller.moved.calls > begun + calls // 8, 120)
        base.process.kill()
        base.process.wait(30)
    for share in (0.4, 0.9):
        with base_process(port) as base:
            reached = begun + int(share * calls)
            until(lambda: client.caller.moved.calls > reached or not thread.is_alive(), 240)  # noqa: B023
            assert thread.is_alive()
    with base_process(port), client:
        thread.join(240)
        assert not thread.is_alive()
        assert found[0][0] == tokens
        assert all(map(equal, found[0][1], trained))


@pytest.mark.slow
def test_a_base_that_stays_away_is_said_to_be_gone():
    with base_process() as base:
        before = len(list(Path("/proc/self/fd").iterdir()))
        privacy = Privacy("base", pool=8, uses=100)
        client = connect(base.where, api_key=KEY, peft={"x": LORA}, privacy=privacy, lost_s=0.5)
        assert client.generate("Hello", "x", **TOKENS).token_ids
        base.process.kill()
        base.process.wait(30)
        where = base.where
        with pytest.raises(BaseLostError, match=rf"is gone, and none answers at {where} within"):
            client.generate("Hello", "x", **TOKENS)
        with pytest.raises(BaseLostError, match="is gone"):
            client.finetune(TEXT_ROWS, **LONG_JOB)
        client.close()
        until(lambda: len(list(Path("/proc/self/fd").iterdir())) <= before)
