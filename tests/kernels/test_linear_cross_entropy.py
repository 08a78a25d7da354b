"""The chunked loss against F.cross_entropy and autograd in fp64, and its machine code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pcg.kernels.triton import linear_cross_entropy as template
from pcg.kernels.triton.linear_cross_entropy import chunk_tokens, linear_cross_entropy
from tests.support.interpreter import bf16
from tests.support.interpreter.gpu_code import Code, Kernel, compiled
from tests.support.interpreter.sanitizer import sanitized

bf16.install()

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2}


def inputs(
    tokens: int, hidden: int, vocabulary: int, dtype: torch.dtype, ignored: Sequence[int] = ()
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(tokens + vocabulary)
    x = torch.randn(tokens, hidden, dtype=torch.float64).to(dtype)
    weight = torch.randn(vocabulary, hidden, dtype=torch.float64).to(dtype)
    targets = torch.randint(vocabulary, (tokens,))
    targets[[i for i in ignored if i < tokens]] = -100
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return x, weight, targets, torch.rand(tokens, dtype=wide) + 0.5


def expected(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    dloss: Tensor,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Loss and dx in fp64."""
    x = x.double().requires_grad_()
    logits = F.linear(x, weight.double(), None if bias is None else bias.double()) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    loss = F.cross_entropy(logits, targets, ignore_index=-100, reduction="none")
    loss.backward(dloss.double())
    assert x.grad is not None
    return loss.detach(), x.grad


def check(found: tuple[Tensor, Tensor | None], wanted: tuple[Tensor, Tensor], like: Tensor) -> None:
    """To the rounding of what z is rounded to: of the largest, as sums of products are."""
    tolerance = TOLERANCE[like.dtype]
    for one, reference in zip(found, wanted, strict=True):
        assert one is not None
        error = (one.double() - reference).abs().max()
        assert error <= tolerance * max(1.0, float(reference.abs().max()))


@settings(max_examples=18)
@given(
    tokens=st.integers(1, 20),
    vocabulary=st.integers(2, 150),
    dtype=st.sampled_from(list(TOLERANCE)),
    ignored=st.lists(st.integers(0, 19), max_size=6),
    chunk=st.sampled_from([1, 7, 16, None]),
    block=st.sampled_from([16, 64, 4096]),
    has_bias=st.booleans(),
    scale=st.sampled_from([1.0, 0.25]),
    softcap=st.sampled_from([0.0, 5.0]),
)
def test_loss_and_gradient_are_autograds(
    tokens: int,
    vocabulary: int,
    dtype: torch.dtype,
    ignored: list[int],
    chunk: int | None,
    block: int,
    has_bias: bool,
    scale: float,
    softcap: float,
) -> None:
    x, weight, targets, dloss = inputs(tokens, 8, vocabulary, dtype, ignored)
    bias = torch.linspace(-1, 1, vocabulary).to(dtype) if has_bias else None
    options: dict[str, Any] = {"scale": scale, "softcap": softcap}
    with sanitized(), mock.patch.object(template, "BLOCK", block):
        found = linear_cross_entropy(x, weight, targets, dloss, bias, chunk=chunk, **options)
        alone, nothing = linear_cross_entropy(
            x, weight, targets, None, bias, chunk=chunk, **options
        )
    check(found, expected(x, weight, targets, dloss, bias, **options), x)
    assert torch.equal(alone, found[0])
    assert nothing is None
    assert found[0].dtype == dloss.dtype
    assert not found[0][targets < 0].any()
    assert found[1] is not None
    assert not found[1][targets < 0].any()


def test_what_is_no_number_stays_where_it_is() -> None:
    x, weight, targets, dloss = inputs(5, 8, 40, torch.float32, ignored=[1])
    x[1] = float("nan")  # ignored
    x[2] = float("nan")
    targets[3] = 40  # beyond the vocabulary
    with sanitized():
        loss, dx = linear_cross_entropy(x, weight, targets, dloss)
    assert dx is not None
    assert loss.isnan().tolist() == [False, False, True, True, False]
    assert loss[1] == 0
    assert not dx[1].any()
    assert dx[2].isnan().all()
    assert dx[[0, 4]].isfinite().all()


def test_columns_that_a_bias_rules_out_count_nothing() -> None:
    x, weight, _, dloss = inputs(6, 8, 70, torch.float32)
    bias = torch.zeros(70)
    bias[:64] = float("-inf")  # a block of its own, the first
    targets = torch.arange(64, 70)
    with sanitized(), mock.patch.object(template, "BLOCK", 32):
        found = linear_cross_entropy(x, weight, targets, dloss, bias)
    check(found, expected(x, weight[64:], targets - 64, dloss), x)


def test_a_chunk_is_so_many_bytes() -> None:
    assert chunk_tokens(128_256, 2) == 512  # 131 MB
    assert chunk_tokens(256_000, 2) == 256
    assert chunk_tokens(256_000, 8) == 128  # one step, though it is 262 MB
    assert chunk_tokens(32_000, 2) == 2048  # 2,097 fit


# ------------------------------------------------------------------------------- machine code

MODULE = template.__name__
POINTERS = {"z": "*bf16", "targets": "*i64", "dloss": "*fp32", "loss": "*fp32"}
SIZES = {"V": "i32", "stride": "i32"}


def options(softcap: float = 0.0, **more: object) -> dict[str, object]:
    return {"SCALE": 1.0, "SOFTCAP": softcap, "BLOCK": 4096, **more}


@pytest.fixture(scope="module")
def codes() -> dict[str, list[Code]]:
    """By what is special about each; V is odd everywhere, for only the stride has to be aligned."""
    whole = {**POINTERS, **SIZES}
    kernels = {
        "bf16": Kernel(MODULE, "loss_rows", whole, options(TRAINS=True), ["V"], warps=16),
        "fp32": Kernel(
            MODULE, "loss_rows", whole | {"z": "*fp32"}, options(TRAINS=True), ["V"], warps=16
        ),
        "softcap": Kernel(MODULE, "loss_rows", whole, options(30.0, TRAINS=True), ["V"], warps=16),
    }
    made = compiled(list(kernels.values()))
    return {name: made[2 * i : 2 * i + 2] for i, name in enumerate(kernels)}


@pytest.mark.parametrize(
    ("name", "loads", "stores"),
    [
        ("bf16", 2, 1),  # two passes read 8 columns a thread, one writes them
        ("fp32", 4, 2),
        ("softcap", 2, 1),
    ],
)
def test_machine_code(codes: dict[str, list[Code]], name: str, loads: int, stores: int) -> None:
    for code in codes[name]:
        code.check_in_registers(64)  # two programs of 512 threads a processor
        assert code.count("LDG", "128") == loads
        assert code.count("STG", "128") == stores
        # Of a row: its target, the target's logit, and the slope; its loss.
        assert code.count("LDG") - loads <= 3
        assert code.count("STG") - stores <= 1
