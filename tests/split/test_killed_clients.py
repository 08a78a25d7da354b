"""kill -9 of a client at any moment: all of it is freed, and nobody else's results change."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import pcg
from pcg.runtime.data.example import Example
from pcg.runtime.executor import Executor
from pcg.split.base.base_executor import BaseExecutor
from pcg.split.base.base_loop import BaseLoop
from pcg.split.base.options import BaseOptions
from pcg.split.client.connect import SplitExecutor, connect
from pcg.split.messages import GRADIENT, Piece
from pcg.split.zeromq import ZeroMqEndpoint
from tests.support import serving
from tests.support.split_base import KEY
from tests.support.waiting import until

pytest.importorskip("zmq")
ROWS = [Example(one, one) for one in ([3, 4, 5, 6, 7, 8], [9, 3, 5])]
JOB: dict[str, Any] = {"adapter": "x", "max_steps": 2, "batch_size": 2, "learning_rate": 1e-2}
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

    def __init__(self, whole: Executor) -> None:
        self.endpoint = ZeroMqEndpoint("127.0.0.1", 0, 2**26)
        base = BaseExecutor(whole)
        self.loop = BaseLoop(base, self.endpoint, BaseOptions(api_key=(KEY,)))
        self.gate, self.entered = threading.Event(), threading.Event()
        self.ran: list[tuple[Piece, int]] = []
        self.holds: Callable[[Piece, int], bool] = lambda _, tokens: False
        self._run = base.run
        base.run = self.run  # type: ignore[method-assign]
        self.thread = threading.Thread(target=self.loop.run)
        self.thread.start()

    def run(self, piece: Piece, inputs: Sequence[Tensor]) -> Any:
        tokens = len(inputs[0])
        self.ran.append((piece, tokens))
        if self.holds(piece, tokens):
            self.entered.set()
            assert self.gate.wait(120)
        return self._run(piece, inputs)

    def close(self) -> None:
        self.gate.set()
        self.loop.stop()
        self.thread.join(60)
        self.endpoint.close()


@pytest.fixture(scope="module")
def whole() -> Executor:
    return pcg.compile(serving.model_directory(), peft={"x": LORA})


@pytest.fixture
def held(whole: Executor) -> Iterator[Held]:
    base = Held(whole)
    yield base
    base.close()


@contextmanager
def killed(held: Held, what: str, transport: str, piece: str) -> Iterator[Callable[[], None]]:
    """A process that does something to a base; yields what kills it."""
    width = held.loop.base.multiplied[piece.partition(":")[2]].shape[1]
    where = held.endpoint.where
    arguments = [what, where, transport, KEY, piece, str(width)]
    command = [sys.executable, "-c", CHILD, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:

        def kill() -> None:
            child.kill()
            child.wait(30)

        try:
            yield kill
        finally:
            kill()


def results(client: SplitExecutor) -> tuple[Any, list[Tensor]]:
    """Greedy tokens, and an adapter that is trained anew."""
    done = client.generate([[5, 6, 7], [8, 9]], max_new_tokens=4, temperature=0)
    client.state.remove_adapter("x")
    client.add_adapter("x", LORA, seed=3)
    client.finetune(ROWS, **JOB)
    return [one.token_ids for one in done], [one.clone() for one in client.adapters["x"].tensors]


def descriptors() -> int:
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
def test_nothing_of_a_killed_client_is_left(
    held: Held, caplog: pytest.LogCaptureFixture, state: str, transport: Any
) -> None:
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
                found: list[Any] = []
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
