"""Runners that the next job of their shape takes over."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, cast

import torch

from pcg.ir.program.program import Training
from pcg.peft.adapter import Adapter, new_adapter
from pcg.peft.registry import recipe_from
from pcg.runtime.training.warm_jobs import KeptRunners

PROGRAM, OTHER = cast(Training, object()), cast(Training, object())


@dataclass(eq=False)
class Runner:
    """A runner with recorded windows."""

    adapter: Adapter
    training: Training = PROGRAM
    is_recorded: bool = True


def adapter(name: str, seed: int = 0, rank: int = 2, **fields: Any) -> Adapter:
    recipe = recipe_from({"peft_type": "LORA", "r": rank, "target_modules": ["q"], **fields})
    return new_adapter(name, recipe, {"layers.0.q": (6, 4)}, seed=seed)


def test_a_job_has_its_weights_in_the_memory_of_another() -> None:
    kept: Any = KeptRunners()
    runner = Runner(adapter("first"))
    places = [x.data_ptr() for x in runner.adapter.tensors]
    kept.give(runner)
    new = adapter("second", seed=1)
    found = kept.take(PROGRAM, new)
    assert found is runner
    assert found.adapter.name == "second"
    assert [x.data_ptr() for x in found.adapter.tensors] == places
    assert all(map(torch.equal, found.adapter.tensors, new.tensors))
    assert kept.take(PROGRAM, new) is None


def test_one_runner_is_kept_of_those_that_do_not_last() -> None:
    kept: Any = KeptRunners()
    runners = [Runner(adapter(f"job {number}")) for number in range(3)]
    kept.give(runners[0], lasts=True)
    for runner in runners[1:]:
        kept.give(runner)
    found = [kept.take(PROGRAM, adapter("next")) for _ in range(3)]
    assert found == [runners[0], runners[2], None]
    kept.give(runners[2])
    kept.give(runners[0])  # which lasts, whoever had it
    assert kept.take(OTHER, adapter("next")) is None
    assert kept.take(PROGRAM, adapter("next")) is runners[0]


def test_a_runner_of_another_shape_is_not_taken() -> None:
    for new, program in (
        (adapter("second", rank=3), PROGRAM),
        (adapter("second", lora_alpha=5), PROGRAM),
        (adapter("second"), OTHER),
    ):
        kept: Any = KeptRunners()
        lasting, passing = Runner(adapter("warm")), Runner(adapter("first"))
        kept.give(passing)
        kept.give(lasting, lasts=True)
        kept.give(Runner(adapter("eager"), is_recorded=False))
        assert kept.take(program, new) is None
        # What a job left is dropped, and what a warm-up recorded is not.
        assert kept.take(PROGRAM, adapter("third")) is lasting
        assert kept.take(PROGRAM, adapter("fourth")) is None


def test_memory_of_runners_goes_with_the_last_job() -> None:
    kept: Any = KeptRunners()
    lasting, passing = Runner(adapter("warm")), Runner(adapter("first"))
    is_there = weakref.ref(passing)
    ends = [kept.begin_job() for _ in range(2)]
    kept.give(lasting, lasts=True)
    kept.give(passing)
    del passing
    ends[0]()
    assert is_there() is not None  # the second job may have it
    ends[1]()
    assert is_there() is None
    assert kept.take(PROGRAM, adapter("next")) is lasting
