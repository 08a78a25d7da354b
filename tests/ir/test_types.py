"""Types, with torch's own promotion and broadcasting as the oracle."""

import itertools
import os
import pickle
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pcg.errors import TypeCheckError
from pcg.ir.types import (
    DTYPE_BYTES,
    TOKENS,
    TORCH_NAMES,
    Dim,
    State,
    TensorType,
    broadcast,
    promote,
    result_dtype,
    tensor,
)

DTYPES = {name: getattr(torch, torch_name) for name, torch_name in TORCH_NAMES.items()}
PAIRS = list(itertools.product(DTYPES, DTYPES))


def test_dtypes_are_torchs() -> None:
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == DTYPE_BYTES


@pytest.mark.parametrize(("left", "right"), PAIRS)
def test_promote_is_torchs(left: str, right: str) -> None:
    assert DTYPES[promote(left, right)] == torch.promote_types(DTYPES[left], DTYPES[right])


@pytest.mark.parametrize("shapes", [((), (3,)), ((3,), ()), ((3,), (3,)), ((), ()), ((1,), ())])
@pytest.mark.parametrize(("left", "right"), PAIRS)
def test_result_dtype_is_torchs(left: str, right: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    operands = [torch.ones(s, dtype=DTYPES[d]) for d, s in zip((left, right), shapes, strict=True)]
    types = [tensor(d, *s) for d, s in zip((left, right), shapes, strict=True)]
    assert DTYPES[result_dtype(*types)] == torch.result_type(*operands)


SHAPES = st.lists(st.sampled_from([1, 2, 3]), max_size=4).map(tuple)


@given(SHAPES, SHAPES)
def test_broadcast_is_torchs(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    try:
        expected = tuple(torch.broadcast_shapes(left, right))
    except RuntimeError:
        with pytest.raises(TypeCheckError, match="do not broadcast"):
            broadcast(left, right)
    else:
        assert broadcast(left, right) == expected


def test_broadcast_of_tokens() -> None:
    assert broadcast((TOKENS, 8, 64), (TOKENS, 1, 64)) == (TOKENS, 8, 64)
    assert broadcast((TOKENS, 64), (64,)) == (TOKENS, 64)
    assert broadcast((), (TOKENS,)) == (TOKENS,)
    with pytest.raises(TypeCheckError, match=r"shapes \[T, 4\] and \[T, 5\] do not broadcast"):
        broadcast((TOKENS, 4), (TOKENS, 5))


@pytest.mark.parametrize(
    ("state", "degree"), [(State.WHOLE, 2), (State.PARTITIONED, 1), (State.PRE_REDUCE, 1)]
)
def test_states_have_degrees(state: State, degree: int) -> None:
    with pytest.raises(TypeCheckError, match=f"has degree {degree}"):
        Dim(8, state, degree)


def test_unknown_dtype() -> None:
    with pytest.raises(TypeCheckError, match="unknown dtype 'fp6'; known: f64"):
        tensor("fp6", 4)


def test_states_count_whole_tensors() -> None:
    type_ = TensorType("f32", (Dim(TOKENS), Dim(8, State.PARTITIONED, 2)))
    assert type_.size_bytes == 32 * TOKENS
    assert type_.with_dtype("f32") == type_
    assert type_.with_features(8) == tensor("f32", TOKENS, 8)


def test_a_type_is_found_by_its_equal_in_another_process() -> None:
    """Its hash is kept, and those of words differ from process to process."""
    type_ = tensor("bf16", TOKENS, 64)
    assert hash(type_) == hash(TensorType("bf16", type_.dims))
    assert type_.features == (64,)
    program = (
        "import pickle, sys; from pcg.ir.types import TOKENS, tensor; "
        "found = pickle.load(sys.stdin.buffer); "
        "assert {found: 1}[tensor('bf16', TOKENS, 64)] == 1"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    command = [sys.executable, "-c", program]
    subprocess.run(command, input=pickle.dumps(type_), env=environment, check=True)
