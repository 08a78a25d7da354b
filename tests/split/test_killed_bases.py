"""kill -9 of a base at any moment: its clients go on where they were, or say that it is gone."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, equal

import pcg
from pcg.errors import BaseLostError
from pcg.split.client.connect import SplitExecutor, connect
from pcg.split.client.noise import Privacy
from tests.support.split_base import KEY, base_process
from tests.support.text_model import ROWS
from tests.support.waiting import until

pytest.importorskip("zmq")
LORA = pcg.LoraConfig(r=4, target_modules="all-linear")
JOB: dict[str, Any] = {"adapter": "x", "max_steps": 4, "batch_size": 2, "learning_rate": 1e-2}
TOKENS: dict[str, Any] = {"max_new_tokens": 8, "temperature": 0}


def results(client: SplitExecutor) -> tuple[Any, list[Tensor]]:
    """An adapter that is trained anew, and greedy tokens by it."""
    client.state.remove_adapter("x")
    client.add_adapter("x", LORA, seed=3)
    client.finetune(ROWS, **JOB)
    done = client.generate("Hello, how", "x", **TOKENS)
    return done.token_ids, [one.clone() for one in client.adapters["x"].tensors]


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["tcp", "shared-memory"])
def test_steps_and_tokens_repeat_exactly_at_a_base_that_is_new(transport: Any) -> None:
    """The base is killed early and late in forward, in backward, and while tokens are decoded."""
    with base_process() as base:
        port = base.where.rpartition(":")[2]
        options: dict[str, Any] = {"api_key": KEY, "transport": transport, "peft": {"x": LORA}}
        client = connect(base.where, lost_s=240, **options)
        calls = client.caller.moved.calls
        tokens, trained = results(client)
        calls = client.caller.moved.calls - calls
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(results(client)))
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
def test_a_base_that_stays_away_is_said_to_be_gone() -> None:
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
            client.finetune(ROWS, **JOB)
        client.close()
        until(lambda: len(list(Path("/proc/self/fd").iterdir())) <= before)
