"""Data parallelism: replicas that take parts of a step train what one process trains."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pcg.errors import UnsupportedError
from pcg.ranks.group import SINGLE_RANK
from pcg.ranks.mesh import MeshSizes, RankMesh, members
from pcg.ranks.step_parts import shares, sum_gradients
from tests.support.ranked import SEQUENCES, make_executor, make_program
from tests.support.threads import run_mesh


@given(
    st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=9), max_size=4), st.integers(1, 5)
)
def test_each_sequence_has_one_replica_and_parts_are_bounded(
    batches: list[list[int]], replicas: int
) -> None:
    parts = shares(batches, replicas)
    assert len(parts) == replicas
    for index, lengths in enumerate(batches):
        places = [place for part in parts for place in part[index]]
        assert sorted(places) == list(range(len(lengths)))
        for part in parts:
            assert part[index] == sorted(part[index])
            tokens = sum(lengths[place] for place in part[index])
            assert tokens <= sum(lengths) // replicas + max(lengths)


def test_batches_of_one_sequence_are_dealt_to_all() -> None:
    parts = shares([[5], [5], [5], [5]], 2)
    assert [sum(map(len, part)) for part in parts] == [2, 2]


def test_groups_of_a_mesh() -> None:
    sizes = MeshSizes(dp=2, tp=2)
    assert members(sizes, ("tp",)) == [[0, 1], [2, 3]]
    assert members(sizes, ("dp",)) == [[0, 2], [1, 3]]
    assert members(sizes, ("pp", "dp", "cp", "tp")) == [[0, 1, 2, 3]]
    assert str(sizes) == "dp=2 tp=2"


def test_what_no_replica_has_a_gradient_of_is_named() -> None:
    def summed(mesh: RankMesh) -> tuple[list[str], Tensor | None]:
        some = torch.zeros(2, requires_grad=True)
        if mesh.dp.rank:
            some.grad = torch.ones(2)
        found = sum_gradients(mesh.data, {"some": some, "none": torch.zeros(3)})
        return found, some.grad

    for found, gradient in run_mesh(MeshSizes(dp=3), summed):
        assert found == ["none"]
        assert gradient is not None
        assert gradient.tolist() == [2.0, 2.0]
    assert sum_gradients(SINGLE_RANK, {"none": torch.zeros(3)}) == ["none"]


def test_replicas_generate_alike_and_have_no_engine() -> None:
    program = make_program("llama3", 1)
    expected = [c.token_ids for c in make_executor(program, "llama3").generate(SEQUENCES, "a")]

    def run(mesh: RankMesh) -> list[tuple[int, ...]]:
        executor = make_executor(program, "llama3", mesh)
        with pytest.raises(UnsupportedError, match="an engine over dp=2"):
            executor.engine()
        with pytest.raises(UnsupportedError, match="trainers over 2 ranks"):
            executor.trainer("t")
        return [c.token_ids for c in executor.generate(SEQUENCES, "a")]

    assert run_mesh(MeshSizes(dp=2), run) == [expected, expected]
