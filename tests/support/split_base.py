"""A base executor for tests: on a thread of this process, or in a process of its own."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

import torch
from torch import Tensor

import pcg.compiler as compiler
from pcg.runtime.data.example import Example
from pcg.runtime.executor import Executor
from pcg.runtime.model.weights import StateDictCheckpoint
from pcg.runtime.training.runner import training_runner
from pcg.split.base.base_executor import BaseExecutor
from pcg.split.base.base_loop import BaseLoop
from pcg.split.base.options import BaseOptions
from pcg.split.base.serve_base import executor_of
from pcg.split.client.connect import SplitExecutor, connect
from pcg.split.zeromq import ZeroMqEndpoint
from tests.support import compiled, oracle, serving
from tests.support.families import BY_NAME
from tests.support.in_process import InProcessEndpoint
from tests.support.prompts import prompts
from tests.support.waiting import until

KEY = "key-of-the-base"


@functools.cache
def undivided(family: str = "llama3", layers: int = 1) -> Executor:
    """Compile a random model of a family, once a session; tests remove the adapters they add."""
    return compiled.executor(oracle.random_model(BY_NAME[family].config(layers)))


@dataclass
class Base:
    """A base on a thread."""

    loop: BaseLoop
    endpoint: InProcessEndpoint

    @property
    def size_bytes(self) -> int:
        """Bytes of its weights, without copies that the undivided executor packs."""
        sizes = {**self.loop.base.multiplied, **self.loop.base.fetched}
        return sum(tensor.nbytes for tensor in sizes.values())

    def connect(self, **options: Any) -> SplitExecutor:
        """A client of it."""
        return connect(self.endpoint.transport(), api_key=KEY, **options)


def make_base(executor: Executor, **options: Any) -> Base:
    """A base whose loop nobody runs yet, by the weights of an undivided executor."""
    endpoint = InProcessEndpoint()
    given = BaseOptions(api_key=(KEY,), **options)
    return Base(BaseLoop(BaseExecutor(executor), endpoint, given), endpoint)


@contextmanager
def running_base(executor: Executor, **options: Any) -> Iterator[Base]:
    """A base that runs."""
    base = make_base(executor, **options)
    with _running(base.loop):
        yield base


@contextmanager
def running_layers(family: str, layers: int, held: str) -> Iterator[Base]:
    """A base that holds some layers of the model of `undivided`, as "0-1", and runs."""
    model = oracle.random_model(BY_NAME[family].config(layers))
    config = model.config.to_dict()
    program = compiler.compile_program(
        config, None, dtype="float32", backend="torch", packed_weights=False
    )
    source = StateDictCheckpoint(model.state_dict(), program.base_prefix)
    base, endpoint = BaseExecutor(executor_of(program, source, held, "cpu")), InProcessEndpoint()
    base.leave_absent()
    loop = BaseLoop(base, endpoint, BaseOptions(api_key=(KEY,)))
    with _running(loop):
        yield Base(loop, endpoint)


@contextmanager
def listening_base(
    executor: Executor, files: Mapping[str, str] | None = None, **options: Any
) -> Iterator[str]:
    """A base that real transports reach, at any port by default; yields its address.

    Args:
        files: of the tokenizer, which clients are sent.
    """
    given = BaseOptions(**{"api_key": (KEY,), "port": 0, **options})
    endpoint = ZeroMqEndpoint("127.0.0.1", given.port, 2**26, given.curve)
    try:
        with _running(BaseLoop(BaseExecutor(executor), endpoint, given, files)):
            yield endpoint.where
    finally:
        endpoint.close()


@contextmanager
def _running(loop: BaseLoop) -> Iterator[None]:
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        yield
    finally:
        loop.stop()
        thread.join(60)


PROMPTS = prompts([6, 3])
EXAMPLES = [Example(one, one) for one in prompts([9, 5])]


def results(
    executor: Executor, method: Any, job: Mapping[str, Any] | None = None
) -> tuple[list[Any], dict[str, Tensor]]:
    """Greedy tokens under a random adapter "x"; its logits, loss, gradients and trained weights.

    It is trained if there are options of a job.
    """
    adapter = executor.add_adapter("x", method, seed=1)
    generator = torch.Generator().manual_seed(2)
    for tensor in adapter.tensors:
        tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.05)
    executor.refresh_adapter("x")
    done = executor.generate(PROMPTS, "x", max_new_tokens=4, temperature=0)
    runner = training_runner(executor.state, executor.state.adapter("x"))
    loss = runner.forward_backward(EXAMPLES, sum(len(one.ids) - 1 for one in EXAMPLES))
    found = {name: p.grad for name, p in runner.parameters.items() if p.grad is not None}
    found |= {"loss": torch.tensor([loss]), "logits": executor.logits(PROMPTS[0], adapter="x")}
    if job is not None:
        executor.finetune(EXAMPLES, "x", **job)
        found |= {f"trained {at}": one for at, one in enumerate(executor.adapters["x"].tensors)}
    executor.state.remove_adapter("x")
    return [one.token_ids for one in done], found


@dataclass
class BaseProcess:
    """A process that serves the small model's base, and its address."""

    process: subprocess.Popen[bytes]
    where: str
    said: IO[str]

    def errors(self) -> str:
        """What it has said on its standard error."""
        self.said.seek(0)
        return self.said.read()


@contextmanager
def base_process(port: str = "0", *options: str) -> Iterator[BaseProcess]:
    """`pcg serve-base` with the small model; it is killed in the end."""
    model = str(serving.model_directory())
    command = [sys.executable, "-m", "pcg_cli", "serve-base", model, "--port", port]
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen([*command, "--api-key", KEY, *options], stderr=said)
        base = BaseProcess(process, "", said)
        try:
            until(lambda: _address(base) is not None, 240)
            base.where = str(_address(base))
            yield base
        finally:
            process.kill()
            process.wait(30)


def _address(base: BaseProcess) -> str | None:
    text = base.errors()
    assert base.process.poll() is None, text
    found = re.search(r"^listening at (\S+)$", text, re.MULTILINE)
    return None if found is None else found[1]
