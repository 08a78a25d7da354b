"""A base in shards over replicas gives what a whole one gives, and holds what is predicted."""

from __future__ import annotations

from typing import Any

import pytest

from pcg.ir.program.program import Program
from pcg.parallel.ranks.mesh import MeshSizes
from tests.support.ranked import (
    make_executor,
    make_program,
    work,
    worst_error,
)
from tests.support.threads import run_mesh

LAYERS = 4
"""More than the rooms for gathered layers."""
SHARDED: dict[str, Any] = {"layers": LAYERS, "packed_weights": False}
TWO = MeshSizes(dp=2)


def outcomes(name: str, program: Program, sizes: MeshSizes) -> list[Any]:
    return run_mesh(sizes, lambda mesh: work(make_executor(program, name, mesh, True)))


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("llama3", TWO),
        ("gpt2", MeshSizes(dp=3)),
        pytest.param("qwen2", TWO, marks=pytest.mark.slow),
        ("mixtral", TWO),
        ("qwen2", MeshSizes(dp=2, tp=2)),
        pytest.param("gpt2", MeshSizes(dp=2, tp=2), marks=pytest.mark.slow),
        pytest.param("mixtral", MeshSizes(dp=2, tp=2), marks=pytest.mark.slow),
    ],
)
def test_a_job_over_a_sharded_base(name: str, sizes: MeshSizes) -> None:
    """A batch of one sequence leaves replicas without any, which have to gather, too."""
    expected = work(make_executor(make_program(name, 1, **SHARDED), name))
    program = make_program(name, sizes.tp, **SHARDED)
    for found in outcomes(name, program, sizes):
        assert worst_error(found, expected) < (1e-6 if sizes.tp == 1 else 1e-5)
