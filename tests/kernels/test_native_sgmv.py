"""The native kernel of few tokens for each adapter, against fp64 products and PyTorch's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pcg.kernels import sgmv
from pcg.kernels.batch import JoinedLora, LoraRun, Segments
from pcg.kernels.sgmv import FEW_TOKENS, add_lora_of_few, is_native
from pcg.kernels.torch import lora as torch_lora

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    not is_native(CPU, torch.float32), reason="there is no C++ compiler"
)


def made(
    sizes: list[int],
    rank: int,
    in_: int,
    outs: list[int],
    start: int = 0,
    column: int = 0,
    dtype: torch.dtype = torch.float32,
) -> JoinedLora:
    """LoRA of an adapter for each size, at neighbouring outputs of `outs`."""
    a = torch.randn(len(sizes), rank * len(outs), in_).to(dtype)
    runs = []
    at = 0
    for i, out in enumerate(outs):
        b = torch.randn(len(sizes), 1, rank, out).to(dtype).transpose(2, 3)
        runs.append(LoraRun(b, at, i * rank, len(outs) == 1))
        at += out
    segments = Segments.of(start, sizes, CPU)
    return JoinedLora(column, at, a, tuple(runs), tuple(runs), {}, segments)


def expected(y: Tensor, x: Tensor, lora: JoinedLora) -> Tensor:
    """The same in fp64, one token after another."""
    y, x = y.double(), x.double()
    first = lora.segments.start
    for slot, size in enumerate(lora.segments.sizes):
        rows = slice(first, first + size)
        first += size
        for run in lora.parts:
            _, count, out, rank = run.b.shape
            for i in range(count):
                ranks = slice(run.row + i * rank, run.row + (i + 1) * rank)
                column = lora.column + run.column + i * out
                s = x[rows] @ lora.a[slot, ranks].double().T
                y[rows, column : column + out] += s @ run.b[slot, i].double().T
    return y


@torch.inference_mode()
def added(y: Tensor, x: Tensor, every: list[JoinedLora]) -> Tensor:
    """y with the LoRA of all, by the kernel alone."""
    y = y.clone()
    assert not add_lora_of_few(y, x, every)
    return y


def inputs(lora: JoinedLora, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    tokens, columns = lora.segments.stop + 2, lora.column + lora.columns + 3
    return torch.randn(tokens, columns).to(dtype), torch.randn(tokens, lora.a.shape[2]).to(dtype)


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any),
    rank=st.sampled_from([0, 1, 3, 7, 8, 20, 64]),
    in_=st.sampled_from([1, 5, 16, 63, 64, 67, 200]),
    outs=st.lists(st.sampled_from([1, 6, 16, 65, 130]), min_size=1, max_size=3),
    start=st.integers(0, 3),
    column=st.sampled_from([0, 5]),
)
def test_sums_equal_fp64(
    sizes: list[int], rank: int, in_: int, outs: list[int], start: int, column: int
) -> None:
    torch.manual_seed(0)
    lora = made(sizes, rank, in_, outs, start, column)
    y, x = inputs(lora)
    right = expected(y, x, lora)
    torch.testing.assert_close(
        added(y, x, [lora]).double(), right, rtol=1e-5, atol=2e-6 * float(right.abs().max())
    )


@pytest.mark.parametrize("out", [2048, 4100, 8193])
def test_outputs_wider_than_what_is_summed_at_a_time(out: int) -> None:
    lora = made([1, 3], 7, 40, [out])
    y, x = inputs(lora)
    torch.testing.assert_close(
        added(y, x, [lora]).double(), expected(y, x, lora), rtol=1e-5, atol=1e-4
    )


def test_a_segment_of_more_products_than_are_held() -> None:
    lora = made([1, FEW_TOKENS, 2], 400, 40, [16])
    y, x = inputs(lora)
    torch.testing.assert_close(
        added(y, x, [lora]).double(), expected(y, x, lora), rtol=1e-5, atol=1e-3
    )


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dtypes_of_activations_and_of_weights(dtype: torch.dtype, weights: torch.dtype) -> None:
    lora = made([2, 0, 1, 5], 20, 96, [130, 33], dtype=weights)
    y, x = inputs(lora, dtype)
    found, right = added(y, x, [lora]), expected(y, x, lora)
    if dtype is torch.float32:
        torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-4)
        return
    # One rounding, of the sum: almost everywhere the nearest number to the right one.
    assert found.dtype is dtype
    assert (found == right.to(dtype)).double().mean() > 0.995
    torch.testing.assert_close(found.double(), right, rtol=2**-8, atol=1e-4)


def test_a_token_does_not_depend_on_the_tokens_beside_it() -> None:
    torch.manual_seed(0)
    whole = made([9], 12, 200, [70, 70])
    y, x = inputs(whole)
    found = added(y, x, [whole])
    for token in range(9):
        alone = replace(whole, segments=Segments.of(0, [1], CPU))
        row = slice(token, token + 1)
        assert torch.equal(added(y[row], x[row], [alone]), found[row])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_with_its_adapter(bad: float) -> None:
    lora = made([1, 2, 0, 1], 3, 40, [37])
    y, x = inputs(lora)
    clean = added(y, x, [lora])
    lora.a[1].fill_(bad)
    lora.parts[0].b[1].fill_(bad)
    lora.a[2].fill_(bad)
    found = added(y, x, [lora])
    assert not found[1:3, :37].isfinite().any()
    keeps = torch.ones_like(found, dtype=torch.bool)
    keeps[1:3, :37] = False
    assert torch.equal(found[keeps], clean[keeps])


def test_threads_give_the_same_numbers() -> None:
    lora = made([1, 3, 0, 2, 1, 1, 7], 16, 128, [96, 96])
    y, x = inputs(lora)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 16):
            torch.set_num_threads(threads)
            found.append(added(y, x, [lora]))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_widths_follow_each_other_and_many_tokens_are_left() -> None:
    few = made([1, 2], 8, 64, [48])
    many = made([FEW_TOKENS + 1, 3], 16, 64, [48], start=3)
    y, x = inputs(many)
    right = expected(expected(y, x, few), x, many)
    with torch.inference_mode():
        (rest,) = add_lora_of_few(y, x, [few, many])
        assert rest.segments.loose == ((0, 0, FEW_TOKENS + 1),)
        torch_lora._add_joined(y, x, rest)
    torch.testing.assert_close(y.double(), right, rtol=1e-5, atol=1e-4)


class _Seen(torch.Tensor):
    pass


def test_what_the_kernel_cannot_read_is_left_to_pytorch() -> None:
    lora = made([1, 2], 8, 64, [48])
    y, x = inputs(lora)
    other = replace(lora.parts[0], b=lora.parts[0].b.contiguous())
    cases: dict[str, tuple[Tensor, Tensor, Any]] = {
        "columns of x apart": (y, x.t().contiguous().t(), lora),
        "columns of y apart": (y.t().contiguous().t(), x, lora),
        "fp64": (y.double(), x.double(), lora),
        "B by output": (y, x, replace(lora, parts=(other,), known={})),
        "a tensor that is not plain": (y, x.as_subclass(_Seen), lora),
    }
    with torch.inference_mode():
        for name, (own_y, own_x, own) in cases.items():
            before = own_y.clone()
            assert add_lora_of_few(own_y, own_x, [own]) == [own], name
            assert torch.equal(own_y, before), name
    before = y.clone()
    assert add_lora_of_few(y, x, [lora]) == [lora]  # gradients may be needed
    assert torch.equal(y, before)


def test_what_programs_call_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    kernel = sgmv._kernel()

    def counted(*arguments: Any) -> None:
        calls.append(arguments)
        kernel(*arguments)

    monkeypatch.setattr(sgmv, "_kernel", lambda: counted)
    lora = made([1, 1], 8, 64, [48])
    y, x = inputs(lora)

    class Weight:
        group_sizes = (48, 3)

    right = expected(y, x, lora)
    with torch.inference_mode():
        parts = torch_lora.add_lora(y, x, Weight(), [lora], [None])
    assert len(calls) == 1
    torch.testing.assert_close(torch.cat(list(parts), 1).double(), right, rtol=1e-5, atol=1e-4)
