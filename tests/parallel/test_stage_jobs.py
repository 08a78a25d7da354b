"""Jobs of an engine over pipeline stages: windows go on through the stages, and back in reverse."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from pcg.peft.lora import LoraConfig
from pcg.peft.prefix import PrefixTuningConfig
from pcg.peft.prompt import PromptTuningConfig
from pcg.ranks import stages as pipeline
from pcg.ranks.mesh import MeshSizes
from pcg.ranks.stages import Stages
from pcg.runtime.admission.limits import Limits
from pcg.runtime.engine.engine import Engine
from pcg.runtime.training.runner import TrainingPass
from pcg.runtime.training.windows import BackwardOrder, Turn
from pcg.runtime.training.work_units import Forward, Part
from tests.support.families import BY_NAME
from tests.support.ranked import make_executor, make_program, recipes
from tests.support.served_jobs import FREE, PROMISES, Served, check_close, serve
from tests.support.threads import run_mesh

LAYERS = 4
TWO = MeshSizes(pp=2)
UPPER = LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj"], layers_to_transform=[3])
JOBS: dict[str, dict[str, Any]] = {
    "two that begin at other layers": {
        "upper": UPPER,
        "lower": LoraConfig(
            r=2, target_modules=["q_proj", "down_proj"], layers_to_transform=[1, 2]
        ),
    },
    "virtual tokens": {"soft": PromptTuningConfig(num_virtual_tokens=3)},
    "keys and values beside DoRA": {
        "prefix": PrefixTuningConfig(num_virtual_tokens=3),
        "dora": LoraConfig(r=3, target_modules="all-linear", use_dora=True),
    },
    "the head alone": {"head": LoraConfig(r=3, target_modules=["lm_head"])},
    "dropout": {"dropped": LoraConfig(r=3, target_modules="all-linear", lora_dropout=0.2)},
}


def of_family(name: str) -> dict[str, Any]:
    return {"new": recipes(BY_NAME[name])["b"]}


def on_one(name: str, jobs: dict[str, Any], **changes: Any) -> Served:
    executor = make_executor(make_program(name, 1, LAYERS), name)
    return serve(executor, FREE, jobs, **changes)


@cache
def of_one(name: str) -> Served:
    return on_one(name, of_family(name))


def over(
    name: str, sizes: MeshSizes, limits: Limits, jobs: dict[str, Any], **options: Any
) -> list[Served]:
    """What each rank has, all of which have decided alike."""
    program = make_program(name, sizes.tp, LAYERS)
    found: list[Served] = run_mesh(
        sizes, lambda mesh: serve(make_executor(program, name, mesh), limits, jobs, **options)
    )
    assert all(served.events == found[0].events for served in found)
    return found


@pytest.mark.parametrize("limits", [FREE, PROMISES], ids=["free", "promises"])
@pytest.mark.parametrize("least", [4, 256], ids=["in parts", "whole"])
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("llama3", TWO),
        pytest.param("gpt2", MeshSizes(pp=2, tp=2), marks=pytest.mark.slow),
        pytest.param("mixtral", MeshSizes(pp=3), marks=pytest.mark.slow),
        pytest.param("qwen3", MeshSizes(pp=4), marks=pytest.mark.slow),
        pytest.param("bloom", TWO, marks=pytest.mark.slow),
        pytest.param("gemma2", TWO, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_job_beside_requests(
    name: str, sizes: MeshSizes, least: int, limits: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens and the adapter are those of one rank, however windows are cut."""
    monkeypatch.setattr(pipeline, "LEAST_TOKENS", least)
    for served in over(name, sizes, limits, of_family(name)):
        check_close(served, of_one(name))


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("two that begin at other layers", MeshSizes(pp=2, tp=2)),
        pytest.param("virtual tokens", TWO, marks=pytest.mark.slow),
        pytest.param("the head alone", TWO, marks=pytest.mark.slow),
        pytest.param("keys and values beside DoRA", MeshSizes(pp=3), marks=pytest.mark.slow),
        pytest.param("dropout", MeshSizes(pp=4), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_what_jobs_train(name: str, sizes: MeshSizes, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = JOBS[name]
    expected = on_one("llama3", jobs)
    monkeypatch.setattr(pipeline, "LEAST_TOKENS", 4)
    for served in over("llama3", sizes, FREE, jobs):
        check_close(served, expected)


def test_steps_that_begin_again_and_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left between stages of a pass that is given up on its way back."""
    monkeypatch.setattr(pipeline, "LEAST_TOKENS", 4)
    again: list[int] = []

    def disturb(engine: Engine, step: int) -> None:
        if engine.jobs and step < 80 and step % 7 == 5 and isinstance(engine.jobs[0].unit, Part):
            engine.jobs[0].begin_step_again()
            again.append(step)
        for name in [job.name for job in engine.jobs]:
            if step % 5 == 1:
                engine.pause_job(name)
            elif step % 5 == 3:
                engine.resume_job(name)

    # Without promises idle steps run all of a pass; here each part of one is a step.
    limits = Limits(tokens=4, least_chunk=4, idle_step_s=1e-5)
    for served in over("llama3", TWO, limits, of_family("llama3"), each=disturb):
        check_close(served, of_one("llama3"))
    assert len(again) > 4


@pytest.mark.parametrize("sizes", [None, TWO], ids=str)
def test_an_evaluation_that_begins_again(sizes: MeshSizes | None) -> None:
    """As where no step has room for its windows, which then are others."""
    again: list[int] = []

    def disturb(engine: Engine, step: int) -> None:
        for job in engine.jobs:
            unit = job.unit
            is_evaluation = isinstance(unit, Forward | Part) and not unit.whole.layers
            if is_evaluation and unit.whole.forwarded and len(again) < 4:
                job.begin_step_again()
                again.append(step)

    limits = Limits(tokens=4, least_chunk=4, idle_step_s=1e-5)
    jobs = of_family("llama3")
    if sizes is None:
        executor = make_executor(make_program("llama3", 1, LAYERS), "llama3")
        check_close(serve(executor, limits, jobs, each=disturb), of_one("llama3"))
    else:
        for served in over("llama3", sizes, limits, jobs, each=disturb):
            check_close(served, of_one("llama3"))
    assert len(again) > 1


def test_stages_go_back_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one stage takes a window back, the stage below has the window behind it."""
    monkeypatch.setattr(pipeline, "LEAST_TOKENS", 4)
    counts: list[int] = []
    back = TrainingPass.backward_requests

    def noted(own: TrainingPass) -> Any:
        assert own._order is not None
        counts.append(len(own._order.under_way))
        return (yield from back(own))

    monkeypatch.setattr(TrainingPass, "backward_requests", noted)
    over("llama3", TWO, Limits(tokens=16, least_chunk=4), of_family("llama3"))
    assert max(counts) == 2


def test_the_order_of_stages() -> None:
    stages = Stages((0, 2, 3, 6))

    def turns(stage: int, first: int, windows: int) -> list[Turn | None]:
        order, found = BackwardOrder(stages, stages[stage], first, windows), list[Turn | None]()
        while not order.is_over:
            found.append(order.turn)
            order.number += 1
        return found

    none = None
    assert turns(2, 1, 2) == [
        (5, 1), (4, 1), (3, 1), (5, 0), (4, 0), (3, 0), none, none,
    ]  # fmt: skip
    assert turns(1, 1, 2) == [none, none, none, (2, 1), none, none, (2, 0), none]
    assert turns(0, 1, 2) == [none, none, none, none, none, none, (1, 1), (1, 0)]
    assert turns(0, 4, 2) == [none] * 4
    assert turns(2, 6, 2) == []
