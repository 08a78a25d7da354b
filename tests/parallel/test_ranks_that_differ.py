"""Ranks that differ in what they were given: all of them are told which, in what, and the fix."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import differing_ranks
from tests.support.differing_ranks import NOT_ON_THREADS, WAYS, World, told
from tests.support.threads import ThreadRanks, run_ranks

Told = dict[str, list[str]]
FAILS_ON_ONE = ("adapter that is not there", "training file that is not there")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("files")
    differing_ranks.write(made)
    return made


def check(name: str, first: str, second: str) -> None:
    words = WAYS[name][1]
    assert words in second
    if name in FAILS_ON_ONE:  # one has the error itself
        assert first.startswith("rank 1 of 2 could not do its part of ")
        assert words in first
    else:
        assert first == second
        assert "rank 1" in first
        assert "Give all ranks" in first


@pytest.mark.slow
def test_each_way_to_differ_is_named_on_all_ranks(folder: Path) -> None:
    names = [name for name in WAYS if name not in NOT_ON_THREADS]

    def on_rank(ranks: ThreadRanks) -> tuple[list[str], float]:
        world = World(ranks, folder)  # type: ignore[arg-type]
        heard = [told(world, name)[0] for name in names]
        return heard, float(world.executor.logits(differing_ranks.ROWS[0], "a").double().sum())

    (first, one), (second, other) = run_ranks(2, on_rank)
    for name, *texts in zip(names, first, second, strict=True):
        check(name, *texts)
    assert one == other  # and they go on together


@pytest.mark.dist
@pytest.mark.slow
def test_each_way_is_named_over_processes(folder: Path) -> None:
    from pcg.ranks.launch import launch

    launch(2, differing_ranks.run, {"folder": str(folder)})
    first, second = (json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2))
    for name in WAYS:
        check(name, first[name][0], second[name][0])
    assert first["agreed"] == second["agreed"]
