"""Rollouts of jobs, asked again while too much waits, and bounded; and what is kept of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from pcg.errors import FinetuneError, QueueFullError
from pcg.records.run import read_run
from pcg.runtime.engine.async_engine import AsyncEngine
from pcg.serve.engine import reinforcement
from pcg.serve.engine.messages import JobStep
from pcg.serve.engine.reinforcement import Rollouts, add_step, opened
from pcg.train.grpo.loop import Sample


class Asked:
    """A request, which ends when it is waited for."""

    def __init__(self, engine: Engine, error: Exception | None) -> None:
        self.is_over = error is not None
        self.was_cancelled = False
        self._engine = engine
        self._error = error

    def wait_all(self) -> list[Any]:
        if self._error is not None:
            raise self._error
        if not self.is_over:
            self._engine.running -= 1
        self.is_over = True
        return ["text"]

    def cancel(self) -> None:
        self.was_cancelled = True


class Engine:
    """An engine that refuses its first requests."""

    def __init__(self, refuses: int = 0) -> None:
        self.refuses = refuses
        self.tenants: list[str] = []
        self.asked: list[Asked] = []
        self.running = self.most = 0

    def submit(self, prompt: Any, *, tenant: str, **_: Any) -> Asked:
        self.tenants.append(tenant)
        error = QueueFullError("full") if len(self.tenants) <= self.refuses else None
        self.asked.append(Asked(self, error))
        if error is None:
            self.running += 1
            self.most = max(self.most, self.running)
        return self.asked[-1]


def test_they_are_their_tenants_and_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reinforcement, "_AGAIN_S", 0.0)
    engine = Engine(refuses=2)
    one = Rollouts(cast(AsyncEngine, engine), "alice", None).submit([1], n=8)
    assert one.wait_all() == one.wait_all() == ["text"]
    assert engine.tenants == ["alice"] * 3


def test_so_many_at_once_and_none_behind_the_end() -> None:
    """A job of thousands of completions leaves room in the queue, for its tenant and for others."""
    engine = Engine()
    made = Rollouts(cast(AsyncEngine, engine), "alice", 16)
    asked = [made.submit([1], n=8) for _ in range(10)]
    assert engine.most == 2
    assert made.submit([1], n=64).wait_all() == ["text"]  # more than there is room for, by itself
    last = made.submit([1], n=8)
    made.end()
    assert engine.asked[-1].was_cancelled
    assert asked[0].wait_all() == last.wait_all() == ["text"]
    with pytest.raises(FinetuneError, match="was cancelled"):
        made.submit([1])


def step(number: int) -> JobStep:
    more = {"reward": 0.5, "valid_reward_mean": 0.25}
    return JobStep(number, 1000, 0.1, None, 1e-4, 1.0, number, 9.0, None, more)


def test_a_long_job_keeps_few_samples(tmp_path: Path) -> None:
    """A page reads all of them, and their texts are the tenant's."""
    some = [Sample(1, [{"role": "user", "content": "a" * 10**5}], "b" * 10**5, {"r": 1.0}, 0.0)]
    with opened(str(tmp_path), {}, "job", [step(1), step(2)]) as record:
        for number in range(3, 1001):
            add_step(record, step(number), some)
    run = read_run(tmp_path)
    assert run.last_step == 1000
    assert run.series["reward"][0] == (1, 0.5)
    assert len(run.series["eval_reward"]) == 1000
    assert len(run.samples) == 200
    assert len(run.samples[0]["prompt"]) == len(run.samples[0]["completion"]) == 2000
