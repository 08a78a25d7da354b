"""Trainers beside requests, jobs and each other, in an engine on a thread."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import Any

import pytest
import torch

import pcg
from pcg.errors import AdapterConflictError, DataError, EngineError, FinetuneError, OutOfMemoryError
from pcg.runtime.admission.limits import Limits
from pcg.runtime.data.example import Example
from pcg.runtime.engine.async_engine import AsyncEngine
from pcg.runtime.executor import Executor
from tests.support.small_engine import make_engine
from tests.support.step_gate import StepGate
from tests.support.trainer_data import LORA, data, pair, parameters, put_alone, sampled
from tests.support.waiting import until

ROWS = sampled((7, 4, 12, 5, 20, 6))
PAGES = 40
WAIT_S = 120


@pytest.fixture(scope="module")
def models() -> tuple[Executor, Any]:
    return pair(torch.float32)


@pytest.fixture
def executor(models: tuple[Executor, Any]) -> Executor:
    put_alone(*models)
    return models[0]


def start(executor: Executor, tokens_of_step: int | None = None, **options: Any) -> AsyncEngine:
    limits = None if tokens_of_step is None else Limits(tokens=tokens_of_step)
    return make_engine(executor, PAGES, limits, **options).start()


def train(trainer: Any, steps: int = 2) -> list[Any]:
    """Ask for all steps at once; returns what the methods gave."""
    found = []
    for step in range(steps):
        found += [trainer.forward_backward(data(ROWS[row : row + 3], "weights")) for row in (0, 3)]
        found.append(trainer.optim_step(learning_rate=1e-2 / (step + 1), grad_clip_norm=1.0))
    return [*found, trainer.snapshot()]


def alone(executor: Executor, seed: int) -> dict[str, torch.Tensor]:
    """The adapter that the same calls make with nothing beside them."""
    name = f"alone{seed}"
    with executor.trainer(name, peft=LORA, seed=seed) as trainer:
        train(trainer)
    return parameters(executor, name)


def test_trainers_a_job_and_requests_at_once(executor: Executor) -> None:
    expected = [alone(executor, seed) for seed in (1, 2)]
    prompt = [3, 1, 4, 1, 5]
    tokens = executor.generate([prompt], adapter="a", max_new_tokens=12, ignore_eos=True)[0]
    with start(executor) as engine:
        trainers = [engine.trainer(f"t{seed}", peft=LORA, seed=seed) for seed in (1, 2)]
        examples = [Example(row["tokens"], row["tokens"]) for row in ROWS]
        job = engine.finetune(examples, "job", peft=LORA, max_steps=3, batch_size=2)
        streams = [
            engine.submit(prompt, adapter="a", max_new_tokens=12, ignore_eos=True) for _ in range(6)
        ]
        for call in [call for trainer in trainers for call in train(trainer)]:
            call.wait(WAIT_S)
        assert [stream.wait(WAIT_S).token_ids for stream in streams] == [tokens.token_ids] * 6
        assert len(job.wait(WAIT_S).losses) == 3
        for seed, own in zip((1, 2), expected, strict=True):
            for path, value in parameters(executor, f"t{seed}").items():
                torch.testing.assert_close(value, own[path], rtol=1e-5, atol=1e-5)
        waiting = engine.numbers()
        assert not engine.engine.jobs  # a trainer without a call takes no step and no page
        assert engine.run(lambda: engine.engine.is_idle)
        assert waiting.free_pages == waiting.pages
        assert engine.numbers().totals.finetuning_steps == 4 + 3
        engine.run(engine.engine.check_integrity)


def test_sampled_log_probabilities_are_those_of_forward(executor: Executor) -> None:
    with start(executor) as engine, engine.trainer("b", peft=LORA) as trainer:
        train(trainer)
        snapshot = trainer.snapshot().wait(WAIT_S)
        rows, found = [], []
        for seed in range(3):
            done = engine.submit(
                [7, 3 + seed, 9], snapshot.adapter.name, max_new_tokens=20, temperature=1.0,
                seed=seed, logprobs=0, ignore_eos=True,
            ).wait(WAIT_S)  # fmt: skip
            tokens = [7, 3 + seed, 9, *done.token_ids]
            rows.append(pcg.Datum(tokens[:-1], [-100, -100, *done.token_ids]))
            found.append(torch.tensor([one.logprob for one in done.logprobs or ()]))
        scored = trainer.forward(rows).wait(WAIT_S)
    for own, sampled_ones in zip(scored.logprobs, found, strict=True):
        assert len(sampled_ones) == 20
        torch.testing.assert_close(own[2:], sampled_ones, rtol=0, atol=1e-5)
        assert own[:2].tolist() == [0.0, 0.0]


def test_a_call_fails_alone(executor: Executor) -> None:
    expected = alone(executor, 1)
    with (
        start(executor) as engine,
        engine.trainer("b", peft=LORA, seed=1, batch_size=64) as trainer,
    ):
        good = train(trainer, 1)[:-1]
        bad = [
            trainer.forward_backward([pcg.Datum([1, 99])]),
            trainer.forward_backward([pcg.Datum([1, 2] * 16)] * 40),
            trainer.forward_backward(data(ROWS), lambda found: found[0].sum() * float("nan")),
            trainer.forward_backward(data(ROWS), lambda found: sys.exit("done")),
            trainer.optim_step(learning_rate=1.0),
        ]
        rest = [
            trainer.forward_backward(data(ROWS[:3], "weights")),
            trainer.forward_backward(data(ROWS[3:], "weights")),
            trainer.optim_step(learning_rate=0.5e-2, grad_clip_norm=1.0),
            trainer.snapshot(),
        ]
        errors = (DataError, OutOfMemoryError, FinetuneError, FinetuneError, FinetuneError)
        for call, error in zip(bad, errors, strict=True):
            with pytest.raises(error):
                call.wait(WAIT_S)
        for call in (*good, *rest):
            call.wait(WAIT_S)
    for path, value in parameters(executor, "b").items():
        torch.testing.assert_close(value, expected[path], rtol=1e-5, atol=1e-5)


def test_a_call_is_cancelled_before_it_runs_and_while_it_does(executor: Executor) -> None:
    with start(executor, 20) as engine, engine.trainer("b", peft=LORA) as trainer:
        trainer.forward_backward(data(ROWS[:2])).wait(WAIT_S)
        norm = trainer.optim_step(learning_rate=0.0).wait(WAIT_S).gradient_norm
        trainer.forward_backward(data(ROWS[:2])).wait(WAIT_S)
        gate = StepGate(engine.engine)
        running = trainer.forward_backward(data(ROWS))
        waiting = trainer.forward_backward(data(ROWS))
        last = trainer.optim_step(learning_rate=0.0)
        gate.let_until(lambda: any(job.tokens for job in list(engine.engine.jobs)))
        waiting.cancel()
        running.cancel()
        gate.open()
        for call in (running, waiting):
            with pytest.raises(FinetuneError, match="was cancelled"):
                call.wait(WAIT_S)
        assert last.wait(WAIT_S).gradient_norm == norm
        assert engine.numbers().free_pages == engine.numbers().pages


def test_what_a_caller_does_holds_up_nobody(executor: Executor) -> None:
    held = threading.Event()

    def loss(found: Any) -> torch.Tensor:
        assert held.wait(WAIT_S)
        return -found[0].sum()

    with start(executor) as engine, engine.trainer("b", peft=LORA) as trainer:
        call = trainer.forward_backward(data(ROWS), loss)
        with engine.trainer("c", peft=LORA) as other:
            for one in train(other, 1):
                one.wait(WAIT_S)
        engine.submit([1, 2], max_new_tokens=4).wait(WAIT_S)
        assert not call.is_over
        held.set()
        assert call.wait(WAIT_S).loss > 0


def test_close_frees_all(executor: Executor) -> None:
    with start(executor, 20) as engine:
        trainer = engine.trainer("b", peft=LORA)
        until(lambda: trainer.created.is_over)
        gate = StepGate(engine.engine)
        calls = [trainer.forward_backward(data(ROWS)), trainer.snapshot()]
        gate.let_until(lambda: any(job.tokens for job in list(engine.engine.jobs)))
        with pytest.raises(AdapterConflictError):
            engine.trainer("b")
        trainer.close().result(WAIT_S)
        for call in calls:
            with pytest.raises(FinetuneError, match="was cancelled"):
                call.wait(WAIT_S)
        with pytest.raises(FinetuneError, match="was closed"):
            trainer.snapshot()
        gate.open()
        numbers = engine.numbers()
        assert (numbers.free_pages, numbers.jobs.total()) == (numbers.pages, 0)
        with engine.trainer("b", peft=LORA) as again:
            again.snapshot().wait(WAIT_S)
        left = engine.trainer("c", peft=LORA)
        until(lambda: left.created.is_over)
    with pytest.raises(EngineError):
        left.snapshot()
    executor.trainer("c", peft=LORA).close()  # the name is free


def test_coroutines_and_the_executors_own_trainer(executor: Executor) -> None:
    async def main(engine: AsyncEngine) -> float:
        async with engine.trainer("b", peft=LORA, seed=1) as trainer:
            with pytest.raises(DataError):
                await trainer.forward([pcg.Datum([])])
            done = await asyncio.gather(*train(trainer))
            return float(done[0].loss)

    with start(executor) as engine:
        loss = asyncio.run(main(engine))
        with executor.trainer("c", peft=LORA, seed=1) as trainer:
            assert train(trainer)[0].loss == pytest.approx(loss, rel=1e-6)
        with pytest.raises(FinetuneError, match=r"(?i)adamww"):
            engine.trainer("d", optimizer="AdamWW")
        with pytest.raises(FinetuneError, match="total_steps"):
            executor.trainer("d", peft={"peft_type": "ADALORA"})
        first = engine.trainer("d", peft="none such")
        call = first.snapshot()
        for one in (first.created, call):
            with pytest.raises(pcg.PcgError):
                one.wait(WAIT_S)
        engine.trainer("d", peft=LORA).end()  # the name is free again
    for path, value in parameters(executor, "b").items():
        torch.testing.assert_close(value, parameters(executor, "c")[path], rtol=1e-5, atol=1e-5)


def test_a_drained_engine_ends_calls_and_takes_none(executor: Executor) -> None:
    with start(executor) as engine:
        trainer = engine.trainer("b", peft=LORA)
        calls = train(trainer)
        drained = engine.drain()
        with pytest.raises(EngineError):
            trainer.snapshot()
        for call in calls:
            call.wait(WAIT_S)
        drained.result(WAIT_S)
