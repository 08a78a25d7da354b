"""A base over ranks: each holds a part of every matrix, and clients cannot tell."""

import os
import signal
import threading
from pathlib import Path

import pytest
import torch

import pcg
import pcg.compiler as compiler
from pcg.ranks.mesh import SINGLE_MESH
from pcg.runtime.data.example import Example
from pcg.runtime.model.weights import StateDictCheckpoint
from pcg.split.base.base_executor import BaseExecutor
from pcg.split.base.base_loop import BaseLoop
from pcg.split.base.options import BaseOptions
from pcg.split.base.serve_base import RankedBase
from pcg.split.base.shards import ShardedSource, Shards
from pcg.split.client.connect import connect
from pcg.split.messages import Message
from tests.support import compiled, oracle
from tests.support.families import BY_NAME
from tests.support.in_process import InProcessEndpoint
from tests.support.prompts import TOLERANCE, prompts
from tests.support.server_process import is_engine as is_spawned
from tests.support.split_base import KEY, base_process
from tests.support.threads import run_ranks
from tests.support.waiting import until

ROWS = [Example(one, one) for one in prompts([9, 5])]
TRAINING = {
    # eps above the gradients, so that a step is as large as they are, and not their signs.
    "max_steps": 2, "batch_size": 2, "learning_rate": 1e-2, "eps": 1.0, "seed": 3,
    "progress": False,
}  # fmt: skip
METHODS = {
    "lora": pcg.LoraConfig(r=4, target_modules="all-linear"),
    "dora": pcg.LoraConfig(r=4, target_modules="all-linear", use_dora=True),
}


def outcome(executor):
    """Logits, greedy tokens, and adapters after two steps."""
    found = [executor.logits(prompts([6])[0])]
    done = executor.generate(prompts([6, 3]), max_new_tokens=4, temperature=0)
    found += [torch.tensor(one.token_ids) for one in done]
    for name, method in METHODS.items():
        executor.finetune(ROWS, adapter=name, peft=method, **TRAINING)
        found += executor.adapters[name].tensors
    return found


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])  # 3 divides none
def test_what_clients_compute_is_the_same(size):
    model = oracle.random_model(BY_NAME["llama3"].config(2))
    whole = compiled.executor(model)
    expected, alone = outcome(whole), BaseExecutor(whole)
    program = compiler.compile_program(model.config.to_dict(), None, dtype="float32")
    found = []

    def serve(ranks):
        source = StateDictCheckpoint(model.state_dict(), program.base_prefix)
        shards = Shards(program, source, torch.device("cpu"), ranks)
        if ranks.rank:
            shards.follow()
            return shards.size_bytes
        weights = ShardedSource(source, shards)
        executor = compiler.make_executor(program, weights, None, None, "cpu", SINGLE_MESH)
        with shards.driving():
            base = RankedBase(executor, shards)
            assert base.digests == alone.digests
            assert base.digest == alone.digest  # so that a client may go on with either
            name = next(iter(base.multiplied))
            for message in (
                Message("lengths", 1, {"name": name}),
                Message("rows", 2, {"name": name, "begin": 20, "end": 50}),
            ):
                one, other = base.answer(message), alone.answer(message)
                torch.testing.assert_close(one.tensors[0], other.tensors[0])
            endpoint = InProcessEndpoint()
            loop = BaseLoop(base, endpoint, BaseOptions(api_key=(KEY,)))
            thread = threading.Thread(target=loop.run)
            thread.start()
            try:
                with connect(endpoint.transport(), api_key=KEY) as split:
                    found.append(outcome(split))
            finally:
                loop.stop()
                thread.join(60)
        return shards.size_bytes

    sizes = run_ranks(size, serve)
    for one, other in zip(found[0], expected, strict=True):
        assert oracle.relative_error(one, other) < TOLERANCE
    matrices = sum(tensor.nbytes for tensor in alone.multiplied.values())
    assert sum(sizes) == matrices
    assert max(sizes) < 1.05 * matrices / size


@pytest.mark.slow
def test_two_processes_serve_and_name_the_one_that_dies():
    with base_process("0", "--tp", "2") as base:
        with pcg.connect(base.where, api_key=KEY, lost_s=0.5) as split:
            assert len(split.generate("a b", max_new_tokens=4, ignore_eos=True).token_ids) == 4
        (driver, other) = ranks_of(base.process)
        os.kill(other, signal.SIGKILL)
        assert base.process.wait(120) == 1
        assert "rank 1 of 2 was ended by SIGKILL" in base.errors()
        assert not Path(f"/proc/{driver}").exists()


@pytest.mark.slow
def test_a_signal_ends_all_ranks_in_order():
    with base_process("0", "--tp", "2") as base:
        split = pcg.connect(base.where, api_key=KEY)
        base.process.send_signal(signal.SIGTERM)
        until(lambda: "no new clients" in base.errors())
        assert len(split.generate("a b", max_new_tokens=4, ignore_eos=True).token_ids) == 4
        split.close()
        assert base.process.wait(120) == 0
        assert "ended: " in base.errors()


def ranks_of(process):
    """The processes of ranks that a launcher has started, the first rank's first."""
    tasks = Path(f"/proc/{process.pid}/task").glob("*/children")
    return sorted(
        pid for task in tasks for pid in map(int, task.read_text().split()) if is_spawned(pid)
    )
