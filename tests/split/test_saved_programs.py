"""Clients that load a saved program compute what the client that saved it does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import pcg.compiler as compiler
from pcg import LoraConfig
from pcg.errors import PcgError
from pcg.runtime.executor import Executor
from pcg.split.client import connect as connecting
from tests.support import oracle
from tests.support.families import BY_NAME
from tests.support.split_base import EXAMPLES, PROMPTS, Base, running_base, undivided

RECIPE = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])


@pytest.fixture(scope="module")
def whole() -> Executor:
    return undivided("llama3", 2)


@pytest.fixture(scope="module")
def base(whole: Executor) -> Iterator[Base]:
    with running_base(whole) as base:
        yield base


@pytest.fixture(scope="module")
def saved(base: Base, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "program"
    with base.connect(peft={"x": RECIPE}, link="5,1") as client:
        client.save_program(folder)
    return folder


def results(client: Any) -> tuple[list[list[int]], list[torch.Tensor]]:
    client.finetune(EXAMPLES, "x", max_steps=2, learning_rate=0.1)
    done = client.generate(PROMPTS, "x", max_new_tokens=4, temperature=0)
    return [list(one.token_ids) for one in done], client.adapters["x"].tensors


def test_a_loaded_program_is_not_compiled_and_computes_the_same(
    base: Base, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with base.connect(peft={"x": RECIPE}, link="5,1") as client:
        tokens, trained = results(client)
        calls = client.caller.moved.calls
    monkeypatch.setattr(connecting, "compile_program", None)
    with base.connect(peft={"x": RECIPE}, link="5,1", program=saved) as client:
        again, theirs = results(client)
        assert client.caller.moved.calls <= calls  # the searched cut, too
    assert again == tokens
    assert all(map(torch.equal, theirs, trained))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cut": "linear"}, "each product has to be a call"),
        ({"privacy": "base"}, "each product has to be a call"),
        ({"model": {"model_type": "llama"}}, "a program has its model"),
        ({"peft": "lora"}, "has its recipes"),
        ({"memory_budget": 0.5}, "leave memory_budget out"),
        ({"program": "nowhere"}, "nowhere"),
    ],
)
def test_what_a_program_does_not_do_is_refused(
    base: Base, saved: Path, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(PcgError, match=message):
        base.connect(**{"program": saved, **given})


def test_a_program_of_another_model_is_refused(saved: Path) -> None:
    other = compiler.compile(oracle.random_model(BY_NAME["llama3"].config(1)), verify=False)
    with running_base(other) as base, pytest.raises(PcgError, match="num_hidden_layers=2, not 1"):
        base.connect(program=saved)
