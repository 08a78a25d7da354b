"""Data parallelism: replicas that take parts of a step train what one process trains."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pcg.errors import FinetuneInterrupted, UnsupportedError
from pcg.peft.lora import LoraConfig
from pcg.ranks.group import SINGLE_RANK
from pcg.ranks.mesh import MeshSizes, RankMesh, members
from pcg.ranks.step_parts import shares, sum_gradients
from pcg.runtime.training.options import StepRecord
from tests.support import ranked
from tests.support.meshes import Trained, check_close, train
from tests.support.ranked import SEQUENCES, make_executor, make_program
from tests.support.threads import run_mesh

METHODS = ("adalora", "dora", "houlsby", "ia3", "prefix", "vera")


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


@functools.cache
def alone(name: str, **options: Any) -> Trained:
    return train(make_executor(make_program(name, 1), name), **options)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("llama3", MeshSizes(dp=2)),
        ("gpt2", MeshSizes(dp=3)),
        ("gemma2", MeshSizes(dp=2, tp=2)),
        ("qwen2", MeshSizes(dp=2, tp=2)),
    ],
    ids=str,
)
def test_replicas_train_what_one_process_trains(name: str, sizes: MeshSizes) -> None:
    """Batches of 3 and 1 of the four examples: the last one leaves some replicas without any."""
    program = make_program(name, sizes.tp)
    for found in run_mesh(sizes, lambda mesh: train(make_executor(program, name, mesh))):
        check_close(found, alone(name))


def test_accumulated_batches_and_their_dropout_are_divided_alike() -> None:
    """Dropout is drawn by a sequence's number in its batch, whoever has it."""
    options = {"gradient_accumulation_steps": 2, "batch_size": 2}
    recipe = LoraConfig(r=4, lora_dropout=0.5, target_modules="all-linear")

    def run(mesh: RankMesh | None) -> Trained:
        executor = make_executor(program, "llama3", mesh)
        return train(executor, "dropped", peft=recipe, **options)

    program = make_program("llama3", 1)
    expected = run(None)
    assert expected[0] != train(make_executor(program, "llama3"), **options)[0]
    for found in run_mesh(MeshSizes(dp=2), run):
        check_close(found, expected)


@pytest.mark.parametrize("method", METHODS)
def test_methods(method: str) -> None:
    program = make_program("llama3", 1)
    recipe = ranked.METHODS[method]
    expected = train(make_executor(program, "llama3"), "new", peft=recipe)
    run = lambda mesh: train(make_executor(program, "llama3", mesh), "new", peft=recipe)  # noqa: E731
    for found in run_mesh(MeshSizes(dp=2), run):
        check_close(found, expected)


def test_a_job_goes_on_at_another_shape(tmp_path: Path) -> None:
    """Two steps by two replicas of two shards, then one by one process, then by three replicas."""
    expected = alone("llama3", eval_data=None)
    options = {"checkpoint_dir": tmp_path, "eval_data": None, "save_every": 1}

    def stop_after(step: int, mesh: RankMesh | None) -> None:
        def interrupt(record: StepRecord) -> None:
            if record.step == step:
                raise KeyboardInterrupt

        executor = make_executor(
            make_program("llama3", mesh.sizes.tp if mesh else 1), "llama3", mesh
        )
        with pytest.raises(FinetuneInterrupted):
            train(executor, on_step=interrupt, **options)

    run_mesh(MeshSizes(dp=2, tp=2), lambda mesh: stop_after(2, mesh))
    stop_after(3, None)
    program = make_program("llama3", 1)
    for found in run_mesh(
        MeshSizes(dp=3), lambda mesh: train(make_executor(program, "llama3", mesh), **options)
    ):
        check_close(found, expected)


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
