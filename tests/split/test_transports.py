"""Clients and a base in processes of their own, over each real transport."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import pcg
from pcg.runtime.executor import Executor
from pcg.split.client.caller import Caller
from pcg.split.client.connect import connect
from pcg.split.transports.shared_memory import SharedMemory
from pcg.split.transports.zeromq_client import transport_to
from tests.support import oracle, serving
from tests.support.prompts import TOLERANCE
from tests.support.split_base import KEY, BaseProcess, base_process
from tests.support.text_model import ROWS
from tests.support.waiting import until

JOB: dict[str, Any] = {"adapter": "x", "max_steps": 4, "batch_size": 2, "learning_rate": 1e-2}
LORA = pcg.LoraConfig(r=4, target_modules="all-linear")
STAYS = """
import sys, time
from pcg.split.client.caller import Caller
from pcg.split.transports.zeromq_client import transport_to
Caller(transport_to(sys.argv[1], sys.argv[2]), {"key": sys.argv[3]}, connect_s=120)
print("here", flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def base() -> Iterator[BaseProcess]:
    with base_process() as started:
        yield started


@pytest.fixture(scope="module")
def whole() -> Executor:
    executor = pcg.compile(serving.model_directory(), peft={"x": LORA})
    executor.finetune(ROWS, **JOB)
    return executor


@pytest.mark.parametrize("transport", ["tcp", "shared-memory"])
def test_a_client_generates_and_finetunes_as_the_undivided_executor(
    base: BaseProcess, whole: Executor, transport: Any
) -> None:
    with connect(base.where, api_key=KEY, transport=transport, peft={"x": LORA}) as split:
        split.finetune(ROWS, **JOB)
        pairs = zip(split.adapters["x"].tensors, whole.adapters["x"].tensors, strict=True)
        for one, other in pairs:
            assert oracle.relative_error(one, other) < TOLERANCE
        options = {"max_new_tokens": 8, "temperature": 0}
        found, expected = (
            executor.generate("Hello, how", "x", **options) for executor in (split, whole)
        )
        assert (found.text, found.token_ids) == (expected.text, expected.token_ids)


@pytest.mark.parametrize("transport", ["tcp", "shared-memory"])
def test_a_killed_client_is_forgotten(base: BaseProcess, transport: str) -> None:
    caller = Caller(transport_to(base.where, "tcp"), {"key": KEY}, connect_s=60)
    try:
        command = [sys.executable, "-c", STAYS, base.where, transport, KEY]
        child = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert child.stdout is not None
        assert child.stdout.readline() == b"here\n"
        assert caller.call("stats").fields["clients"] == 2
        child.kill()
        child.wait(30)
        child.stdout.close()
        until(lambda: caller.call("stats").fields["clients"] == 1)
        assert "is gone" in base.errors()
    finally:
        caller.close()


def test_a_base_that_is_killed_and_started_again_is_found(whole: Executor) -> None:
    with base_process() as first:
        where = first.where
        split = connect(where, api_key=KEY, peft={"x": LORA}, lost_s=240)
        trained = threading.Thread(target=lambda: split.finetune(ROWS, **JOB))
        before = split.caller.moved.calls
        trained.start()
        until(lambda: split.caller.moved.calls > before + 20 or not trained.is_alive())
        first.process.kill()
        first.process.wait(30)
    with base_process(where.rpartition(":")[2]), split:
        trained.join(240)
        assert not trained.is_alive()
        pairs = zip(split.adapters["x"].tensors, whole.adapters["x"].tensors, strict=True)
        for one, other in pairs:
            assert oracle.relative_error(one, other) < TOLERANCE


def test_shared_memory_goes_both_ways_and_has_bounds() -> None:
    own = SharedMemory.make(2**20)
    other = SharedMemory.attach(os.getpid(), own.descriptor, 2**20)
    x = torch.randn(3, 5).to(torch.bfloat16)
    (place,) = other.put((x,), is_reply=False) or [0]
    assert torch.equal(own.view(place, x.dtype, (3, 5), is_reply=False), x)
    assert own.put((torch.zeros(2**20),), is_reply=True) is None
    for at in (-64, 3, 2**19, 2**19 - 8, "0", 2**70):
        with pytest.raises(pcg.PcgError, match="not in the shared memory"):
            own.view(at, torch.float32, (16,), is_reply=False)  # type: ignore[arg-type]
    with pytest.raises(OSError, match=r"[Oo]peration not permitted"):
        os.ftruncate(other.descriptor, 0)
    own.close()
    other.close()
