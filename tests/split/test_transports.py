"""Clients and a base in processes of their own, over each real transport."""

import os
import subprocess
import sys
import threading

import pytest
import torch

import pcg
from pcg.errors import BaseLostError, SplitError
from pcg.split.base.base_executor import BaseExecutor
from pcg.split.base.base_loop import BaseLoop
from pcg.split.base.options import BaseOptions
from pcg.split.client.caller import Caller
from pcg.split.client.connect import connect
from pcg.split.shared_memory import SharedMemory
from pcg.split.zeromq import ZeroMqEndpoint, transport_to
from tests.support import oracle, serving
from tests.support.prompts import TOLERANCE
from tests.support.split_base import KEY, base_process, listening_base
from tests.support.text_model import ROWS
from tests.support.waiting import until

pytest.importorskip("zmq")
JOB = {"adapter": "x", "max_steps": 4, "batch_size": 2, "learning_rate": 1e-2}
LORA = pcg.LoraConfig(r=4, target_modules="all-linear")
STAYS = """
import sys, time
from pcg.split.base.base_executor import BaseExecutor
from pcg.split.base.base_loop import BaseLoop
from pcg.split.base.options import BaseOptions
from pcg.split.client.caller import Caller
from pcg.split.zeromq import ZeroMqEndpoint
from pcg.split.zeromq import transport_to
caller = Caller(transport_to(sys.argv[1], sys.argv[2]), {"key": sys.argv[3]}, connect_s=120)
print("here", flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def base():
    with base_process() as started:
        yield started


@pytest.fixture(scope="module")
def whole():
    executor = pcg.compile(serving.model_directory(), peft={"x": LORA})
    executor.finetune(ROWS, **JOB)
    return executor


@pytest.mark.parametrize(
    "transport", [pytest.param("tcp", marks=pytest.mark.slow), "shared-memory"]
)
def test_a_client_generates_and_finetunes_as_the_undivided_executor(base, whole, transport):
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


@pytest.mark.parametrize(
    "transport", ["tcp", pytest.param("shared-memory", marks=pytest.mark.slow)]
)
def test_a_killed_client_is_forgotten(base, transport):
    command = [sys.executable, "-c", STAYS, base.where, transport, KEY]
    caller = Caller(transport_to(base.where, "tcp"), {"key": KEY}, connect_s=60)
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout.readline() == b"here\n"
            assert caller.call("stats").fields["clients"] == 2
            child.kill()
            until(lambda: bool(caller.call("stats").fields["clients"] == 1))
            assert "is gone" in base.errors()
        finally:
            child.kill()
            caller.close()


@pytest.mark.parametrize("transport", ["tcp", "shared-memory"])
def test_a_call_is_made_again_at_a_base_that_is_new(whole, transport):
    with listening_base(whole) as where:
        caller = Caller(transport_to(where, transport), {"key": KEY}, connect_s=60, lost_s=120)
        name, (_, width) = next(iter(caller.facts.pieces.items()))
        x = torch.randn(3, width)
        (first,) = caller.call("run", (x,), piece=f"linear:{name}").tensors
        weight = BaseExecutor(whole).multiplied[name]
        assert torch.allclose(first, x @ weight.t(), atol=1e-5)
    with listening_base(whole, port=int(where.rpartition(":")[2])):
        (again,) = caller.call("run", (x,), piece=f"linear:{name}").tensors
        assert torch.equal(again, first)
        caller.close()


def test_a_client_says_that_no_base_is_there():
    with pytest.raises(BaseLostError, match="no base executor answers at"):
        connect("127.0.0.1:9", connect_s=0.1)
    for where in (
        *("nowhere", "127.0.0.1:port", ":1", "127.0.0.1:", "127.0.0.1:0", "127.0.0.1:65536"),
        *("127.0.0.1:١", "127.0.0.1:1/path", "me:key@127.0.0.1:1", "two words:1", "*:1"),
        *("ipc:///tmp/x:1", "a\0b:1", "127.0.0.1:1;127.0.0.1:2", "http://127.0.0.1:1"),
    ):
        with pytest.raises(SplitError, match="no address"):
            connect(where, plaintext=True)


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_a_base_listens_at_ipv6(whole, host):
    try:
        endpoint = ZeroMqEndpoint(host, 0, 2**20)
    except SplitError as error:
        pytest.skip(f"this machine has no IPv6: {error}")
    loop = BaseLoop(BaseExecutor(whole), endpoint, BaseOptions(api_key=(KEY,), host=host))
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        assert endpoint.where.startswith("[::1]:")
        for where in (endpoint.where, endpoint.where.replace("[", "").replace("]", "")):
            caller = Caller(transport_to(where, "auto"), {"key": KEY})
            assert caller.facts.name == loop.base.name
            caller.close()
    finally:
        loop.stop()
        thread.join(60)
        endpoint.close()


def test_shared_memory_goes_both_ways_and_has_bounds():
    own = SharedMemory.make(2**20)
    other = SharedMemory.attach(os.getpid(), own.descriptor, 2**20)
    x = torch.randn(3, 5).to(torch.bfloat16)
    (place,) = other.put((x,), is_reply=False) or [0]
    assert torch.equal(own.view(place, x.dtype, (3, 5), is_reply=False), x)
    assert own.put((torch.zeros(2**20),), is_reply=True) is None
    for at in (-64, 3, 2**19, 2**19 - 8, "0", 2**70):
        with pytest.raises(pcg.PcgError, match="not in the shared memory"):
            own.view(at, torch.float32, (16,), is_reply=False)
    with pytest.raises(OSError, match=r"[Oo]peration not permitted"):
        os.ftruncate(other.descriptor, 0)
    own.close()
    other.close()
