"""An engine on threads over ranks: the first drives, and all have what one rank has."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import TCPStore

from pcg.errors import AdapterError, EngineError, FinetuneError, GenerationError, UnsupportedError
from pcg.kernels.torch import lora
from pcg.kernels.torch import ops as torch_ops
from pcg.runtime.admission.limits import Limits
from pcg.runtime.engine.async_engine import AsyncEngine
from pcg.runtime.executor import Executor
from pcg.runtime.metrics.events import Kind
from pcg.runtime.metrics.status import JobState
from tests.support.driving_rank import DEGREE
from tests.support.families import BY_NAME
from tests.support.interpreter import bf16
from tests.support.ranked import (
    EXAMPLES,
    JOB,
    SEQUENCES,
    USED,
    make_executor,
    make_program,
    recipes,
)
from tests.support.served_jobs import CACHE_BYTES, FREE, PROMISES, Served, check_close, serve
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


# --------------------------------------------------------------------------- decisions of all ranks

bf16.install()


def serve_one(executor: Executor, name: str, limits: Limits, **changes: Any) -> Served:
    return serve(executor, limits, {"new": recipes(BY_NAME[name])["b"]}, **changes)


@cache
def on_one(name: str, **changes: Any) -> Served:
    return serve_one(make_executor(make_program(name, 1), name), name, FREE, **changes)


@pytest.mark.parametrize("limits", [FREE, PROMISES], ids=["free", "promises"])
@pytest.mark.parametrize(
    ("name", "degree"), [("llama3", 2), pytest.param("gpt2", 2, marks=pytest.mark.slow)]
)
def test_an_engine_over_ranks(name: str, degree: int, limits: Limits) -> None:
    """Tokens and the adapter are those of one rank; times and all that is decided are one."""
    program = make_program(name, degree)
    found = run_ranks(
        degree, lambda ranks: serve_one(make_executor(program, name, ranks), name, limits)
    )
    expected = on_one(name)
    for served in found:
        check_close(served, expected)
        assert served.events == found[0].events
    kinds = [kind for _, kind, _ in found[0].events]
    assert kinds.count(Kind.PUBLISHED) == kinds.count(Kind.STEPPED) + 1
    assert kinds.index(Kind.STARTED) < kinds.index(Kind.TOKEN)


@pytest.mark.slow
def test_programs_for_triton_over_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same by kernels, whose rows are those of each rank's pieces in pages of the cache."""
    job: dict[str, Any] = {"epochs": 1, "eval_data": None}
    expected = on_one("llama3", **job)
    program = make_program("llama3", 2, backend="triton")
    monkeypatch.delattr(lora, "_add_joined")
    monkeypatch.delattr(torch_ops, "outer")
    run = lambda ranks: serve_one(make_executor(program, "llama3", ranks), "llama3", FREE, **job)  # noqa: E731
    found = run_ranks(2, run)
    for served in found:
        check_close(served, expected)
        assert served.events == found[0].events


def test_an_error_of_one_rank_is_the_error() -> None:
    """Nothing that is done about it waits for the others."""
    program = make_program("llama3", 2)

    def fail(ranks: ThreadRanks) -> None:
        executor = make_executor(program, "llama3", ranks)
        engine = executor.engine(kv_cache_bytes=CACHE_BYTES)
        engine.submit(executor.request(SEQUENCES[0], None, max_new_tokens=4))
        engine.step()
        if ranks.rank == 1:
            engine.device.start = broken  # type: ignore[method-assign]
        engine.step()

    def broken(*_: object) -> list[int]:
        raise MemoryError("no memory on this rank")

    with pytest.raises(MemoryError, match="no memory on this rank"):
        run_ranks(2, fail)


@pytest.mark.parametrize("changes", [{}, {"sequence_parallel": True}], ids=["whole", "parts"])
def test_logprobs_continuations_and_embeddings_over_ranks(changes: dict[str, Any]) -> None:
    """All ranks have one rank's numbers, whether they hold all tokens between layers or a part."""

    def ask(executor: Executor) -> tuple[list[Any], Tensor, Tensor]:
        options: Any = {"max_new_tokens": 3, "ignore_eos": True, "logprobs": 2, "n": 2}
        drawn: Any = {"temperature": 1.0, "seed": 3, "prompt_logprobs": 1}
        done = executor.generate(SEQUENCES[:3], list(USED[:3]), **options, **drawn)
        tokens = [(one.token_ids, [t.top[0][0] for t in one.logprobs or ()]) for one in done]
        found = [t for one in done for t in (*(one.prompt_logprobs or ()), *(one.logprobs or ()))]
        values = torch.tensor([one.logprob for one in found if one is not None])
        return tokens, values, executor.embed(SEQUENCES[:3], list(USED[:3]), pooling="mean")

    program = make_program("llama3", 2, **changes)
    one = ask(make_executor(make_program("llama3", 1), "llama3"))
    for tokens, values, states in run_ranks(
        2, lambda ranks: ask(make_executor(program, "llama3", ranks))
    ):
        assert tokens == one[0]
        torch.testing.assert_close(values, one[1], rtol=0, atol=1e-5)
        torch.testing.assert_close(states, one[2], rtol=1e-5, atol=1e-5)


def test_a_decode_step_asks_for_no_time_and_gathers_logits_once() -> None:
    """The first rank gets the others' parts of the logits, and tells tokens and time at once."""
    rows, steps, name = 3, 4, "llama3"
    program, config = make_program(name, 2), BY_NAME[name].config(2)

    def decode(executor: Executor) -> tuple[list[Any], dict[str, int], dict[str, int]]:
        engine = executor.engine(kv_cache_bytes=CACHE_BYTES)
        for place in range(rows):
            drawn = {"temperature": 1.0, "seed": 3} if place else {}
            options: Any = {"max_new_tokens": 9, "ignore_eos": True, **drawn}
            engine.submit(executor.request(SEQUENCES[place], USED[place], **options))
        chunks = engine.step()
        before = dict(executor.ranks.messages), dict(executor.ranks.moved_bytes)
        for _ in range(steps):
            chunks += engine.step()
        now = executor.ranks.messages, executor.ranks.moved_bytes
        sent = [{k: now[i][k] - before[i][k] for k in now[i]} for i in range(2)]
        return [(one.index, one.token_id) for one in chunks], *sent

    expected, _, _ = decode(make_executor(make_program(name, 1), name))
    part = rows * config["vocab_size"] // 2 * 4
    assert len(expected) == rows * (steps + 1)
    found = run_ranks(2, lambda ranks: decode(make_executor(program, name, ranks)))
    for rank, (chunks, messages, sent) in enumerate(found):
        assert chunks == expected
        # Two sums a layer and the embedding's; before there were six more messages a step: the
        # time five times, and the tokens; and each rank sent its part of the logits to all.
        sums = 2 * config["num_hidden_layers"] + 1
        of_layers = {"all_gather": messages["all_gather"], "all_reduce": messages["all_reduce"]}
        counts = {"gather": steps, "broadcast": steps}
        counts |= dict.fromkeys(("all_to_all", "reduce_scatter", "send"), 0)
        assert messages == of_layers | counts
        assert messages["all_reduce"] == sums * steps
        assert sent["gather"] == (part * steps if rank else 0)
        assert sent["broadcast"] == (0 if rank else (rows + 1) * 8 * steps)


# --------------------------------------------------------------------------------------- lost ranks

ROOT = Path(__file__).parents[3]
SCRIPT = "tests/support/driving_rank.py"
SOON_S = 60
"""Far below the 300 s that ranks wait for each other; alone it takes 3 to 5 s."""


def start(rank: int, what: str, store: TCPStore, degree: int) -> subprocess.Popen[str]:
    environ = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(degree),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, SCRIPT, what, str(degree)]
    return subprocess.Popen(command, cwd=ROOT, env=environ, **pipes)  # type: ignore[call-overload, no-any-return]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("what", "victim", "degree"),
    [
        pytest.param("idle", 1, DEGREE, marks=pytest.mark.slow),
        pytest.param("busy", 1, DEGREE, marks=pytest.mark.slow),
        pytest.param("idle", 0, DEGREE, marks=pytest.mark.slow),
        pytest.param("busy", 0, DEGREE, marks=pytest.mark.slow),
    ],
)
def test_a_killed_rank_ends_the_others(what: str, victim: int, degree: int) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [start(rank, what, store, degree) for rank in range(degree)]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "ready\n"
        ranks[victim].kill()
        killed_s = time.monotonic()
        for number, rank in enumerate(ranks):
            if number == victim:
                continue
            out, errors = rank.communicate(timeout=SOON_S)
            said = out if number == 0 else errors
            assert not re.search(r"gloo|\.cc:|Connection (closed|reset)", out)
            assert f"rank {victim} of {degree}" in said or f"ranks {victim}" in said, said
            assert rank.returncode == (0 if number == 0 else 1)
        assert time.monotonic() - killed_s < SOON_S
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
