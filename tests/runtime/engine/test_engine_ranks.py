"""Engines over ranks serve and train what an engine on one rank does, and decide alike."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from pcg.kernels.torch import lora
from pcg.kernels.torch import ops as torch_ops
from pcg.runtime.admission.limits import Limits
from pcg.runtime.executor import Executor
from pcg.runtime.metrics.events import Kind
from tests.support.families import BY_NAME
from tests.support.interpreter import bf16
from tests.support.ranked import (
    SEQUENCES,
    USED,
    make_executor,
    make_program,
    recipes,
)
from tests.support.served_jobs import CACHE_BYTES, FREE, PROMISES, Served, check_close, serve
from tests.support.threads import ThreadRanks, run_ranks

bf16.install()


def serve_one(executor: Executor, name: str, limits: Limits, **changes: Any) -> Served:
    return serve(executor, limits, {"new": recipes(BY_NAME[name])["b"]}, **changes)


@cache
def on_one(name: str, **changes: Any) -> Served:
    return serve_one(make_executor(make_program(name, 1), name), name, FREE, **changes)


@pytest.mark.parametrize("limits", [FREE, PROMISES], ids=["free", "promises"])
@pytest.mark.parametrize(("name", "degree"), [("llama3", 2), ("gpt2", 2)])
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
        counts = {"gather": steps, "broadcast": steps, "reduce_scatter": 0, "send": 0}
        assert messages == of_layers | counts
        assert messages["all_reduce"] == sums * steps
        assert sent["gather"] == (part * steps if rank else 0)
        assert sent["broadcast"] == (0 if rank else (rows + 1) * 8 * steps)
