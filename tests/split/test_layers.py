"""Bases that hold some layers each: a request goes to where its layer is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Thread

import pytest
import torch

import pcg
import pcg.compiler as compiler
from pcg.errors import SplitError
from pcg.passes.placement import exact_cut
from pcg.runtime.data.example import Example
from pcg.runtime.model.weights import StateDictCheckpoint
from pcg.split.base.base_executor import BaseExecutor
from pcg.split.base.base_loop import BaseLoop
from pcg.split.base.options import BaseOptions
from pcg.split.base.serve_base import executor_of, held_layers
from pcg.split.client.connect import connect
from pcg.split.client.noise import Privacy
from tests.support import oracle
from tests.support.families import BY_NAME, FAMILIES, Family
from tests.support.in_process import InProcessEndpoint
from tests.support.prompts import TOLERANCE, prompts
from tests.support.split_base import KEY, Base, results, running_base

ROWS = [Example(one, one) for one in prompts([9, 5])]
DORA = pcg.LoraConfig(r=4, target_modules="all-linear", use_dora=True)


@contextmanager
def running_layers(model: torch.nn.Module, layers: str) -> Iterator[Base]:
    """A base of some layers, on a thread."""
    program = compiler.compile_program(
        model.config.to_dict(),  # type: ignore[operator, union-attr]
        None,
        dtype="float32",
        backend="torch",
        packed_weights=False,
    )
    source = StateDictCheckpoint(model.state_dict(), program.base_prefix)
    base = BaseExecutor(executor_of(program, source, layers, "cpu"))
    base.leave_absent()
    endpoint = InProcessEndpoint()
    loop = BaseLoop(base, endpoint, BaseOptions(api_key=(KEY,)))
    thread = Thread(target=loop.run)
    thread.start()
    try:
        yield Base(loop, endpoint)
    finally:
        loop.stop()
        thread.join(60)


def test_a_client_of_two_bases_computes_the_same() -> None:
    model = oracle.random_model(BY_NAME["llama3"].config(3))
    whole = compiler.compile(model, verify=False)
    tokens = whole.generate(prompts([6, 3]), max_new_tokens=4, temperature=0)
    training = {"max_steps": 2, "batch_size": 2, "eps": 1.0, "seed": 3, "progress": False}
    whole.finetune(ROWS, adapter="x", peft=DORA, **training)
    with ExitStack() as stack:
        bases = [stack.enter_context(running_layers(model, one)) for one in ("0-1", "2")]
        one, other = bases
        with pytest.raises(SplitError, match=r"no base executor at .* holds model\.layers\.2"):
            one.connect()
        with pytest.raises(SplitError, match=r"name all that hold layers"):
            other.connect()
        places = [base.endpoint.transport() for base in bases]
        split = stack.enter_context(connect(places, api_key=KEY))
        found = split.generate(prompts([6, 3]), max_new_tokens=4, temperature=0)
        assert [a.token_ids for a in found] == [b.token_ids for b in tokens]
        split.finetune(ROWS, adapter="x", peft=DORA, **training)
        for a, b in zip(split.adapters["x"].tensors, whole.adapters["x"].tensors, strict=True):
            assert oracle.relative_error(a, b) < TOLERANCE
        counts = [base.loop.counts.requests for base in bases]
        second = stack.enter_context(running_base(whole))
        with pytest.raises(SplitError, match="is the one that noise is to hide from"):
            connect(
                [base.endpoint.transport() for base in bases],
                api_key=KEY,
                privacy=Privacy([base.endpoint.transport() for base in bases]),
            )
        hidden = connect(
            [base.endpoint.transport() for base in bases],
            api_key=KEY,
            privacy=Privacy(second.endpoint.transport(), effects_api_key=KEY),
        )
        with hidden:
            found = hidden.generate(prompts([6, 3]), max_new_tokens=4, temperature=0)
            assert [a.token_ids for a in found] == [b.token_ids for b in tokens]
        with pytest.raises(SplitError, match=r"name all that hold layers"):
            second.connect(privacy=Privacy(one.endpoint.transport()))
        assert split.caller.moved.calls > sum(counts) > 0
        assert min(counts) > 0
        held = [sum(one.nbytes for one in base.loop.base.multiplied.values()) for base in bases]
        every = BaseExecutor(whole).multiplied
        assert sum(held) == sum(tensor.nbytes for tensor in every.values())
        own = bases[1].loop.base
        fetched = sum(one.nbytes for one in own.fetched.values())
        assert own.size_bytes < held[1] + fetched + 100  # constants of positions


@pytest.mark.parametrize(
    "family",
    [
        one if one.name in ("mixtral", "llama3.2") else pytest.param(one, marks=pytest.mark.slow)
        for one in FAMILIES
    ],
    ids=str,
)
def test_clients_of_every_family_connect_to_one_base_and_to_bases_of_layers(
    monkeypatch: pytest.MonkeyPatch, family: Family
) -> None:
    # The search of StableLM's norms of each head takes minutes to find that they are too many.
    monkeypatch.setattr(exact_cut, "MOST_STATES", 10_000)
    model = oracle.random_model(family.config(2))
    whole = compiler.compile(model, verify=False)
    lora = pcg.LoraConfig(r=4, target_modules=list(family.usual_targets))
    tokens, numbers = results(whole, lora)
    with ExitStack() as stack:
        alone = stack.enter_context(running_base(whole))
        bases = [stack.enter_context(running_layers(model, one)) for one in ("0", "1")]
        places = [base.endpoint.transport() for base in bases]
        for split in (alone.connect(), connect(places, api_key=KEY)):
            found, own = results(stack.enter_context(split), lora)
            assert found == tokens
            assert own.keys() == numbers.keys()
            for name, expected in numbers.items():
                assert oracle.relative_error(own[name], expected) < TOLERANCE, name


def test_bases_of_other_weights_are_no_one_model() -> None:
    models = [oracle.random_model(BY_NAME["llama3"].config(2)) for _ in range(2)]
    models[1].model.layers[1].mlp.up_proj.weight.data[3, 5] *= 1 + 2**-20  # in either's files
    with running_layers(models[0], "0") as one, running_layers(models[1], "1") as other:
        places = [one.endpoint.transport(), other.endpoint.transport()]
        with pytest.raises(SplitError, match="have other weights"):
            connect(places, api_key=KEY)


@pytest.mark.parametrize("text", ["", "3-1", "0-4", "-1", "a", "0-1-2"])
def test_layers_that_are_none_are_refused(text: str) -> None:
    assert held_layers("1-3", 4) == range(1, 4)
    with pytest.raises(SplitError, match="0-3 for all 4"):
        held_layers(text, 4)


def test_a_transport_that_there_is_not_is_refused_with_the_reason() -> None:
    with pytest.raises(SplitError, match="members of a process group are fixed"):
        connect("127.0.0.1:8300", api_key=KEY, transport="distributed")  # type: ignore[arg-type]
