"""An engine on threads over ranks: the first drives, and all have what one rank has."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from pcg.errors import AdapterError, EngineError, FinetuneError, GenerationError, UnsupportedError
from pcg.peft.lora import LoraConfig
from pcg.runtime.engine.async_engine import AsyncEngine
from pcg.runtime.executor import Executor
from pcg.runtime.metrics.status import JobState
from pcg.runtime.requests.stream import Stream
from tests.support import oracle
from tests.support.families import BY_NAME
from tests.support.ranked import (
    EXAMPLES,
    JOB,
    LAYERS,
    SEQUENCES,
    USED,
    make_executor,
    make_program,
    recipes,
)
from tests.support.threads import ThreadRanks, run_ranks

NAME = "llama3"
NEW = 6
OPTIONS: dict[str, Any] = {"max_new_tokens": NEW, "ignore_eos": True}
SHORT: dict[str, Any] = {**JOB, "epochs": 1, "eval_data": None}
WAIT_S = 120


@functools.cache
def program(degree: int) -> Any:
    return make_program(NAME, degree)


def on_ranks(act: Callable[[Executor, AsyncEngine], Any], degree: int = 2) -> list[Any]:
    """What `act` gives on the first rank, and the adapters of those that follow."""

    def run(ranks: ThreadRanks) -> Any:
        executor = make_executor(program(degree), NAME, ranks)
        with executor.engine(kv_cache_bytes=2**20).start() as running:
            if ranks.rank == 0:
                return act(executor, running)
        return sorted(executor.adapters)

    return run_ranks(degree, run)


def test_requests_and_a_job() -> None:
    """Tokens and the trained adapter are those of one rank without a thread."""
    alone = make_executor(program(1), NAME)
    expected = [one.token_ids for one in alone.generate(SEQUENCES, USED, **OPTIONS)]
    recipe = recipes(BY_NAME[NAME])["b"]
    alone.finetune(EXAMPLES, "new", peft=recipe, **SHORT)
    (after,) = alone.generate(SEQUENCES[:1], "new", **OPTIONS)

    def act(executor: Executor, running: AsyncEngine) -> None:
        steps: list[int] = []
        job = running.finetune(
            EXAMPLES, "new", peft=recipe, on_step=lambda one: steps.append(one.step), **SHORT
        )
        streams = [
            running.submit(ids, adapter, **OPTIONS)
            for ids, adapter in zip(SEQUENCES, USED, strict=True)
        ]
        assert [stream.wait(WAIT_S).token_ids for stream in streams] == expected
        assert len(steps) <= job.wait(WAIT_S).steps == 2
        trained = alone.adapters["new"].tensors
        for ours, theirs in zip(executor.adapters["new"].tensors, trained, strict=True):
            assert float((ours - theirs).norm() / theirs.norm()) < 1e-5
        assert running.submit(SEQUENCES[0], "new", **OPTIONS).wait(WAIT_S) == after
        assert executor.generate(SEQUENCES, USED, **OPTIONS)[2].token_ids == expected[2]

    assert on_ranks(act)[1] == ["a", "b", "new"]


class Life:
    """Random calls of a driven engine, and what transformers and peft make of its requests."""

    def __init__(self, folder: Path) -> None:
        self.base = oracle.random_model(BY_NAME[NAME].config(LAYERS))
        self.wrapped = {
            seed: oracle.with_adapter(self.base, "all-linear", rank=3, seed=seed)
            for seed in (1, 2, 3)
        }
        for seed, model in self.wrapped.items():
            oracle.save(model, folder / str(seed))
        self.folder = folder
        self.greedy = functools.cache(self._greedy)

    def _greedy(self, seed: int, place: int) -> list[int]:
        model = self.wrapped[seed] if seed else self.base
        return list(oracle.greedy(model, list(SEQUENCES[place]), NEW))

    def live(self, random: Random, executor: Executor, running: AsyncEngine) -> None:
        served: dict[str, int] = {}
        asked: list[tuple[Stream, int, int]] = []
        cancelled: set[Stream] = set()
        job = running.finetune(EXAMPLES, "job", publish_every=1, peft=LORA, **SHORT)
        for _ in range(60):
            kind = random.choices(["submit", "cancel", "add", "remove", "job", "bad"], RATES)[0]
            name = random.choice("xy")
            if kind == "submit":
                named, place = random.choice([None, *served]), random.randrange(len(SEQUENCES))
                stream = running.submit(SEQUENCES[place], named, **OPTIONS)
                asked.append((stream, served[named] if named else 0, place))
            elif kind == "cancel" and asked:
                stream = random.choice(asked)[0]
                stream.cancel()
                cancelled.add(stream)
            elif kind == "add":
                seed = random.choice(list(self.wrapped))
                running.add_adapter(name, self.folder / str(seed), replace=True).result(WAIT_S)
                served[name] = seed
            elif kind == "remove" and served.pop(name, None):
                executor.remove_adapter(name)
            elif kind == "job":
                random.choice([job.pause, job.resume])()
            elif kind == "bad":
                with pytest.raises(GenerationError):
                    running.submit([random.choice([-1, 2**70])], **OPTIONS).wait(WAIT_S)
        job.resume()
        for stream, seed, place in asked:
            found, expected = stream.wait(WAIT_S), self.greedy(seed, place)
            assert list(found.token_ids) == expected[: len(found.token_ids)]
            assert found.finish_reason == "length" or stream in cancelled
        assert job.wait(WAIT_S).steps == 2


RATES = (12, 3, 3, 1, 3, 1)
LORA = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")


def test_random_lives_have_the_tokens_of_peft(tmp_path: Path) -> None:
    """Beside adapters that come, are replaced and go, cancelled requests and a paused job."""
    life = Life(tmp_path)
    for seed in (0, 1):
        on_ranks(functools.partial(life.live, Random(seed)))


def test_what_fails_fails_alike() -> None:
    """Bad calls have one rank's errors, and the engine goes on."""

    def act(executor: Executor, running: AsyncEngine) -> None:
        with pytest.raises(GenerationError, match="the model's are 0 to"):
            running.submit([10**6], max_new_tokens=1).wait(WAIT_S)
        with pytest.raises(AdapterError, match=r"has no adapter_config\.json"):
            running.add_adapter("x", Path(__file__).parent).result(WAIT_S)
        with pytest.raises(AdapterError, match="remove it first"):
            executor.add_adapter("a", "lora")
        with pytest.raises(AdapterError, match="there is no adapter 'x'"):
            executor.remove_adapter("x")
        with pytest.raises(FinetuneError, match="callback says no"):
            running.finetune(EXAMPLES, "new", on_step=refuse, **SHORT).wait(WAIT_S)
        job = running.finetune(EXAMPLES, "new", **SHORT)
        job.cancel()
        with pytest.raises(FinetuneError, match="was cancelled"):
            job.wait(WAIT_S)
        assert job.state is JobState.CANCELLED
        with pytest.raises(UnsupportedError, match="the others do not know"):
            executor.logits(SEQUENCES[0])
        with pytest.raises(UnsupportedError, match="trainers over 2 ranks"):
            running.trainer("new")
        assert len(running.submit(SEQUENCES[0], "a", **OPTIONS).wait(WAIT_S).token_ids) == NEW
        running.drain().result(WAIT_S)

    on_ranks(act)


def refuse(_: object) -> None:
    raise FinetuneError("the callback says no")


def test_a_rank_that_follows_takes_nothing() -> None:
    has_asked = threading.Event()

    def ask(ranks: ThreadRanks) -> None:
        executor = make_executor(program(2), NAME, ranks)
        running = executor.engine(kv_cache_bytes=2**20).start()
        if ranks.rank == 0:
            assert has_asked.wait(WAIT_S)
            running.close()
            return
        calls: list[Callable[[], object]] = [
            lambda: running.submit(SEQUENCES[0]),
            lambda: running.finetune(EXAMPLES, "new"),
            lambda: running.add_adapter("x"),
            lambda: running.remove_adapter("a"),
            lambda: running.cancel("x"),
            lambda: running.drain(),
            lambda: executor.generate(SEQUENCES),
        ]
        for call in calls:
            with pytest.raises(EngineError, match=r"rank 1 .* make the call on rank 0 only"):
                call()
        has_asked.set()
        running.close()  # waits for the first rank's
        with pytest.raises(EngineError, match=r"rank 0, which rank 1 follows, .* was closed"):
            running.submit(SEQUENCES[0])

    run_ranks(2, ask)
