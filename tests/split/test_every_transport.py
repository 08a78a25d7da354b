"""Six families with five methods each over both transports, two clients at once, against the whole.

One family with one method is in the default run; the others are slow.

AdamW divides a gradient by its own size, so that an entry whose gradient is rounding alone moves by
a whole step in either direction: adapters that were trained have a bound of their own.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import pcg
import pcg.compiler as compiler
from pcg.runtime.data.example import Example
from pcg.runtime.executor import Executor
from pcg.runtime.training.runner import training_runner
from tests.support import oracle
from tests.support.families import BY_NAME
from tests.support.prompts import TOLERANCE, prompts
from tests.support.split_base import KEY, listening_base

pytest.importorskip("zmq")
METHODS = {
    "lora": pcg.LoraConfig(r=4, target_modules="all-linear"),
    "dora": pcg.LoraConfig(r=4, target_modules="all-linear", use_dora=True),
    "ia3": pcg.IA3Config(),
    "bottleneck": pcg.BottleneckConfig(bottleneck_size=8),
    "prefix": pcg.PrefixTuningConfig(num_virtual_tokens=3),
}
FAMILIES = ("llama3", "gpt2", "llama3.2", "qwen2", "opt", "gemma2")
TRANSPORTS = ("tcp", "shared-memory")
ROWS = [Example(one, one) for one in prompts([9, 5, 7])]
TRAINED_TOLERANCE = 3e-5
JOB: dict[str, Any] = {"max_steps": 2, "batch_size": 2, "learning_rate": 1e-3}


def numbers(executor: Executor, method: object) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Greedy tokens under an adapter; its gradients, and what it is once it was trained."""
    adapter = executor.add_adapter("x", method, seed=1)
    generator = torch.Generator().manual_seed(2)
    for tensor in adapter.tensors:
        tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.05)
    executor.refresh_adapter("x")
    done = executor.generate(prompts([6, 3]), "x", max_new_tokens=3, temperature=0)
    runner = training_runner(executor.state, executor.state.adapter("x"))
    runner.forward_backward(ROWS, sum(one.targets for one in ROWS))
    found = {n: p.grad.clone() for n, p in runner.parameters.items() if p.grad is not None}
    executor.finetune(ROWS, adapter="x", **JOB)
    trained = executor.adapters["x"].tensors
    found |= {f"trained {index}": one.clone() for index, one in enumerate(trained)}
    executor.state.remove_adapter("x")
    return [one.token_ids for one in done], found


CASES = [
    pytest.param(
        family,
        tuple(METHODS) if slow else ("dora",),
        transport,
        marks=[pytest.mark.slow] if slow else [],
        id=f"{family}-{transport}{'' if slow else '-quick'}",
    )
    for slow in (False, True)
    for family in (FAMILIES if slow else FAMILIES[:1])
    for transport in (TRANSPORTS if slow else TRANSPORTS[1:])
]


@pytest.mark.parametrize(("family", "methods", "transport"), CASES)
def test_clients_at_once_compute_what_the_undivided_executor_does(
    family: str, methods: tuple[str, ...], transport: str
) -> None:
    model = oracle.random_model(BY_NAME[family].config(2))
    whole = compiler.compile(model, verify=False)
    expected = {name: numbers(whole, METHODS[name]) for name in methods}
    found: dict[tuple[int, str], Any] = {}
    with listening_base(whole) as where:
        given: Any = {"api_key": KEY, "transport": transport, "connect_s": 60}
        clients = [pcg.connect(where, **given) for _ in range(2)]

        def work(client: int) -> None:
            # In different orders, so that methods meet.
            for name in methods[client:] + methods[:client]:
                found[client, name] = numbers(clients[client], METHODS[name])

        threads = [threading.Thread(target=work, args=(client,)) for client in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
        for one in clients:
            one.close()
    assert len(found) == 2 * len(methods)
    for (client, name), (tokens, own) in found.items():
        wanted_tokens, wanted = expected[name]
        assert tokens == wanted_tokens, (client, name)
        assert own.keys() == wanted.keys()
        assert len(wanted) > 1
        for key, tensor in wanted.items():
            error = oracle.relative_error(own[key], tensor)
            bound = TRAINED_TOLERANCE if key.startswith("trained") else TOLERANCE
            assert error < bound, (client, name, key, error)
