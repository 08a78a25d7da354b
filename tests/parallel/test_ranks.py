"""What ranks agree on before they work together, and what the others hear of a rank that fails."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pcg.compiler as compiler
from pcg.errors import (
    AdapterError,
    FinetuneInterrupted,
    ParallelError,
    PcgError,
    RankLostError,
)
from pcg.peft.lora import LoraConfig
from pcg.ranks import join
from pcg.ranks.group import ProcessRanks, RowsToAll, run_on_first
from pcg.ranks.join import check_own_gpu
from pcg.ranks.launch import RankError, read_errors
from pcg.runtime.executor import Executor
from tests.support.parallelized import PLAN
from tests.support.ranked import make_executor, make_program
from tests.support.threads import ThreadRanks, run_ranks

NAME = "llama2"
WITHOUT_MLP = {module: style for module, style in PLAN.items() if "mlp" not in module}


def refusals(*programs: Any) -> list[str]:
    """What each rank says of its own program."""

    def on_rank(ranks: ThreadRanks) -> str:
        with pytest.raises(ParallelError) as caught:
            make_executor(programs[ranks.rank], NAME, ranks)
        return str(caught.value)

    return run_ranks(len(programs), on_rank)


@pytest.mark.parametrize(
    ("options", "differs"),
    [
        ({"tp_plan": WITHOUT_MLP}, "tp_plan, the serving program, the training program"),
        ({"adapter_copies": "float32"}, "adapter_copies ('float32', not None)"),
        ({"batch": 3}, "batch (3, not 2)"),
        ({"costs": "A10G"}, "costs (A10G, not H100)"),
        ({"memory_budget": 0.0}, "the memory budget (0, not 1), the training program"),
        ({"peft": "lora"}, "the adapters, the training program"),
        (
            {"dtype": "float64"},
            "the model, dtype ('float64', not 'float32'), the serving program, the training ",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_ranks_with_other_programs_are_refused_on_all(
    options: dict[str, Any], differs: str
) -> None:
    one, other = make_program(NAME, 2), make_program(NAME, 2, **options)
    first, second = refusals(one, other)
    assert first == second
    assert f"differ from rank 0: rank 1 in {differs}" in first


def test_a_profile_is_compared_by_what_stands_in_it(tmp_path: Path) -> None:
    """Not by where it lies: here two copies of one, and another one."""
    paths = [tmp_path / name for name in ("a.json", "b.json", "c.json")]
    for path, text in zip(paths, ("one", "one", "another"), strict=True):
        path.write_text(20 * text)
    program = make_program(NAME, 2)
    options = [dataclasses.replace(program.options, costs=str(path)) for path in paths]
    programs = [dataclasses.replace(program, options=one) for one in options]
    run_ranks(2, lambda ranks: make_executor(programs[ranks.rank], NAME, ranks))
    first, _ = refusals(programs[0], programs[2])
    assert "rank 1 in costs." in first


def test_every_rank_that_differs_is_named() -> None:
    one, other = make_program(NAME, 4), make_program(NAME, 4, costs="L40S")
    (said, *others) = refusals(one, other, one, other)
    assert set(others) == {said}
    assert "4 ranks have to agree on the program" in said
    assert "rank 1 in costs (L40S, not H100); rank 3 in costs (L40S, not H100)." in said


def test_adapters_that_come_later_are_compared_too() -> None:
    program = make_program(NAME, 2, peft=None)

    def on_rank(ranks: ThreadRanks) -> tuple[str, Executor]:
        executor = make_executor(program, NAME, ranks)
        target = ("q_proj", "o_proj")[ranks.rank]
        with pytest.raises(ParallelError) as caught:
            executor.add_adapter("a", LoraConfig(r=4, target_modules=(target,)))
        return str(caught.value), executor

    for said, executor in run_ranks(2, on_rank):
        assert (
            "agree on add_adapter('a'), and some differ from rank 0: rank 1 in the recipe, " in said
        )
        assert not executor.adapters


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), OSError("disk full"), AdapterError("no")], ids=repr
)
def test_all_ranks_hear_of_an_error_of_the_first(error: BaseException) -> None:
    def act() -> None:
        raise error

    def on_rank(ranks: ThreadRanks) -> BaseException:
        with pytest.raises(BaseException) as caught:  # noqa: PT011
            run_on_first(ranks, act)
        return caught.value

    first, *others = run_ranks(3, on_rank)
    assert first is error
    for other in others:
        assert isinstance(other, ParallelError)
        assert "rank 0 could not do its work for all ranks" in str(other)


def test_a_gpu_that_two_ranks_have_named_is_refused_on_all() -> None:
    def on_rank(ranks: ThreadRanks, gpus: tuple[str, ...]) -> None:
        check_own_gpu(store, ranks.rank, ranks.size, gpus[ranks.rank])

    store = dist.HashStore()
    run_ranks(2, lambda ranks: on_rank(ranks, ("GPU-a", "GPU-b")))
    store = dist.HashStore()
    message = 'ranks 0, 2 have the same one; use device="cuda", which gives each its own'
    with pytest.raises(ParallelError, match=message):
        run_ranks(3, lambda ranks: on_rank(ranks, ("GPU-a", "GPU-b", "GPU-a")))


class Lone:
    """A process group whose other ranks do not answer."""

    def __init__(self, size: int) -> None:
        self._size = size

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self._size


@pytest.mark.parametrize(
    ("size", "there", "words"),
    [
        (2, None, "rank 1 of 2 ended"),
        (4, None, "one of the ranks 1, 2, 3 of 4 ended"),  # a group of the user's own: no store
        (4, (1, 2, 3), "one of the ranks 1, 2, 3 of 4 ended, or waits for something else"),
        (4, (1, 3), "rank 2 of 4 ended"),
        (4, (1,), "ranks 2, 3 of 4 ended"),
    ],
)
def test_a_lost_rank_is_named_as_far_as_it_is_known(
    size: int, there: tuple[int, ...] | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **options: object) -> None:
        raise RuntimeError("connection closed")

    monkeypatch.setattr("pcg.ranks.group.ROLL_CALL_S", 0.1)
    monkeypatch.setattr(dist, "all_reduce", broken)
    store = None if there is None else dist.HashStore()
    for rank in there or ():
        assert store is not None
        store.set(f"pcg/still-there/{rank}", "here")
    group: Any = Lone(size)
    with pytest.raises(RankLostError, match=words) as caught:
        ProcessRanks(group, torch.device("cpu"), store).all_reduce(torch.ones(1))
    assert "connection closed" not in str(caught.value)  # the library's text is its cause's


def test_a_rank_that_is_lost_meanwhile_is_named_where_it_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Broken:
        def wait(self) -> None:
            raise RuntimeError("connection closed")

    monkeypatch.setattr(dist, "all_gather", lambda *args, async_op, **options: Broken())
    group: Any = Lone(2)
    ranks = ProcessRanks(group, torch.device("cpu"))
    wait = ranks.begin("all_gather", torch.ones(3))
    assert (ranks.moved_bytes["all_gather"], ranks.messages["all_gather"]) == (12, 1)
    with pytest.raises(RankLostError, match=r"rank 1 of 2 ended.* was in an all-gather with it"):
        wait()


@pytest.mark.parametrize(
    ("device", "backend"),
    [("cpu", "gloo"), pytest.param("cuda", "nccl", marks=pytest.mark.gpu)],
)
def test_what_is_sent_stays_until_all_has_come(device: str, backend: str) -> None:
    """Nobody else holds it, and what is made meanwhile would take its memory."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        ranks = ProcessRanks(dist.group.WORLD, torch.device(device))  # type: ignore[arg-type]
        begun = []
        kinds = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all")
        for place, collective in enumerate(kinds):
            x = torch.full((2**22,), float(place), device=device)
            given = {"reduce_scatter": [x], "all_to_all": RowsToAll(x, [2**22], [2**22])}
            begun.append(ranks.begin(collective, given.get(collective, x)))
        del x, given
        others = [torch.full((2**22,), -1.0, device=device) for _ in range(8)]
        for place, wait in enumerate(begun):
            came = wait()
            came = came[0] if isinstance(came, list) else came
            assert bool((came == place).all())
        assert all(bool((other == -1).all()) for other in others)
    finally:
        dist.destroy_process_group()


def test_the_time_that_ranks_wait_is_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    class Asked(Exception):
        pass

    def asked(*args: object, timeout: timedelta, **options: object) -> Any:
        given.append(timeout.total_seconds())
        raise Asked

    monkeypatch.setattr(join, "rendezvous", asked)
    for name, value in {"RANK": 1, "WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    for asked_for in ({}, {"rank_timeout_s": 7.5}):
        with pytest.raises(Asked):
            compiler.compile({}, tp=2, device="cpu", **asked_for)
    assert given == [join.TIMEOUT_S, 7.5]
    for wrong in (0, -1, float("nan"), "7", True):
        with pytest.raises(ParallelError, match=r"rank_timeout_s=.*; use seconds above 0"):
            compiler.compile({}, tp=2, device="cpu", rank_timeout_s=wrong)
    with pytest.raises(ParallelError, match=r"rank_timeout_s=7 has no effect with tp=1"):
        compiler.compile({}, device="cpu", rank_timeout_s=7)


def test_each_ranks_own_sheet_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of torch's current device, which is the first on all of them."""
    asked: list[torch.device] = []

    def own_sheet(device: torch.device, degree: int) -> str:
        asked.append(device)
        raise PcgError("asked")

    monkeypatch.setattr(compiler, "own_sheet", own_sheet)
    monkeypatch.setattr(compiler, "machine_device", torch.device)  # there is no GPU to try
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    for name, value in {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(PcgError, match="asked"):
        compiler.compile({}, tp=2, device="cuda")
    assert asked == [torch.device("cuda", 1)]


class OfOnesOwn(Exception):
    """An error that takes more than a text."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one}, {other}")


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (AdapterError("no such"), AdapterError, "no such (on rank 1 of 2)"),
        (FileNotFoundError(2, "No such file", "a/b"), FileNotFoundError,
         "[Errno 2] No such file (on rank 1 of 2): 'a/b'"),
        (FinetuneInterrupted("after 2", 2, Path("c")), FinetuneInterrupted, "after 2"),
        (torch.OutOfMemoryError("CUDA"), torch.OutOfMemoryError, "CUDA (on rank 1 of 2)"),
        (OfOnesOwn("a", "b"), ParallelError, "OfOnesOwn: a, b (on rank 1 of 2)"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), ParallelError, "UnicodeDecodeError: "),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)  # fmt: skip
def test_errors_of_started_ranks_keep_their_type_and_traceback(
    error: Exception, kind: type[Exception], text: str, tmp_path: Path
) -> None:
    try:
        raise error
    except Exception as caught:
        RankError.of(1, caught).write(tmp_path)
    RankError.of(0, RankLostError("rank 1 is gone")).write(tmp_path)
    made = read_errors(tmp_path)[0].made(2)
    assert type(made) is kind
    assert str(made).startswith(text)
    assert "raise error" in str(made.__cause__)
    if isinstance(made, FinetuneInterrupted):
        assert (made.step, made.checkpoint) == (2, Path("c"))
