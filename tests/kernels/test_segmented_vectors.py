"""Per-token vectors and activations of many adapters, against float64 and autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pcg.errors import CodegenError
from pcg.kernels.triton.adapters.segmented_activate import (
    FUNCTIONS,
    segment_sum,
    segmented_activate,
)
from pcg.kernels.triton.adapters.segmented_vectors import (
    segment_inner,
    segmented_bias_add,
    segmented_scale,
)
from tests.support.interpreter import bf16
from tests.support.interpreter.gpu_code import IS_NEW_TRITON, Kernel, compiled
from tests.support.interpreter.sanitizer import sanitized
from tests.support.parameters import mostly_slow
from tests.support.segmented_batches import (
    DTYPES,
    ROUNDING,
    Case,
    cases,
    check_close,
    drawn,
    firsts_of,
    matrix,
    padded,
    scales_of,
    scattered,
)

bf16.install()

dtypes = st.sampled_from(DTYPES)

_ORACLES: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "relu": torch.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
}


def own_columns(case: Case) -> list[tuple[int, int, int, slice]]:
    """Slice, token, slot and columns of every token with a vector."""
    return [
        (j, token, slot, slice(start, start + size))
        for j, (start, size) in enumerate(zip(case.starts, case.sizes, strict=True))
        for token, slot in enumerate(case.slots)
        if slot >= 0 and case.ranks[j][slot]
    ]


@pytest.mark.parametrize("has_base", [False, True])
@pytest.mark.parametrize("adds", [False, True])
@settings(max_examples=12)
@given(case=cases(2, 1), y_dtype=dtypes, dtype=dtypes)
def test_scale_and_bias(
    case: Case, y_dtype: torch.dtype, dtype: torch.dtype, has_base: bool, adds: bool
) -> None:
    generator, width = case.generator, sum(case.sizes)
    vectors = scattered(case.ranks, case.starts, case.sizes, case.adapters, dtype, generator)
    base = torch.randn(width, generator=generator).to(y_dtype) if has_base else None
    y, tiles = drawn(case, y_dtype, width), case.tiles
    before = y.double()
    expected, magnitude = before.clone(), before.abs()
    own_base = torch.zeros(width).double() if base is None else base.double()
    for j, token, slot, own in own_columns(case):
        v, rest = matrix(vectors, j, case.adapters[slot])[0], own_base[own]
        if adds:
            expected[token, own] += v - rest
            magnitude[token, own] += v.abs() + rest.abs()
        else:
            expected[token, own] = (before[token, own] - rest) * v + rest
            magnitude[token, own] = (before[token, own].abs() + rest.abs()) * v.abs() + rest.abs()
    with sanitized():
        if adds:
            found = segmented_bias_add(y, vectors, tiles, base)
        else:
            found = segmented_scale(y, vectors, tiles, base)
    least = torch.finfo(y_dtype).tiny  # below it fp16 has fewer bits
    check_close(found, expected, magnitude.clamp_min(least), 1e-6 + ROUNDING[y_dtype])
    assert found is y


@pytest.mark.parametrize("of", ["y", "y and base", "dy alone"])
@settings(max_examples=12)
@given(case=cases(2, 1), dtype=dtypes)
def test_gradients_of_vectors(case: Case, dtype: torch.dtype, of: str) -> None:
    generator, width = case.generator, sum(case.sizes)
    vectors = scattered(
        case.ranks, case.starts, case.sizes, case.adapters, torch.float32, generator
    )
    dy, scales, tiles = drawn(case, dtype, width), scales_of(case), case.tiles
    y = torch.randn(len(case.slots), width + 16, generator=generator).to(dtype)
    base = torch.randn(width, generator=generator).to(dtype) if of == "y and base" else None
    before = replace(vectors, memory=vectors.memory.clone())
    with sanitized():
        given_y = None if of == "dy alone" else y
        segment_inner(dy, given_y, vectors, tiles, base, scales)
    right = torch.ones_like(y).double() if of == "dy alone" else y.double()
    for j, (start, size) in enumerate(zip(case.starts, case.sizes, strict=True)):
        for slot, has in enumerate(case.ranks[j]):
            tokens = [token for token, own in enumerate(case.slots) if own == slot]
            if not has:
                continue
            expected = torch.zeros(size).double()
            magnitude = torch.ones(size).double()
            if not tokens:
                expected = matrix(before, j, case.adapters[slot])[0]
            for token in tokens:
                own = slice(start, start + size)
                rest = right[token, own] - (0 if base is None else base[own].double())
                term = scales[j, slot] * dy[token, own].double() * rest
                expected, magnitude = expected + term, magnitude + term.abs()
            check_close(matrix(vectors, j, case.adapters[slot])[0], expected, magnitude, 2e-6)


@pytest.mark.parametrize("function", mostly_slow(FUNCTIONS, "gelu", "silu"))
@settings(max_examples=5)
@given(case=cases(2, 40), parts=st.sampled_from((1, 3)), is_scaled=st.booleans())
def test_activations(function: str, case: Case, parts: int, is_scaled: bool) -> None:
    generator, most, slices = case.generator, 40, len(case.ranks)
    # As wide as the widest, as rows of a RankRows are of one size.
    has = [[1 if rank % 16 else 0 for rank in of] for of in case.ranks]
    biases = scattered(has, [0] * slices, [most] * slices, case.adapters, torch.float32, generator)
    gradients = scattered(
        has, [0] * slices, [most] * slices, case.adapters, torch.float32, generator
    )
    widths = torch.tensor(case.ranks, dtype=torch.int32)
    tiles, scales = case.tiles, scales_of(case) if is_scaled else None
    shape = (slices, tiles.capacity.sums)
    s, dz = (torch.randn(parts, *shape, generator=generator) * 2 for _ in range(2))
    before = gradients.memory.clone()
    with sanitized():
        z = segmented_activate(s, biases, widths, tiles, function, scales)
        ds = segmented_activate(s, biases, widths, tiles, function, scales, dz)
        segment_sum(ds, gradients, widths, tiles, scales)
    for j in range(slices):
        items = tiles.segments.tolist()[: tiles.capacity.segments]
        for slot, _, count, stride, _, start, _, _ in items:
            width, of_slot = case.ranks[j][slot], slice(start, start + count * stride)
            if not count:
                continue

            def sums(x: Tensor, j: int = j, own: slice = of_slot, size: int = stride) -> Tensor:
                return x[:, j, own].view(len(x), -1, size)

            factor = 1.0 if scales is None else float(scales[j, slot])
            own = torch.zeros(most).double()
            if has[j][slot]:
                own = matrix(biases, j, case.adapters[slot])[0]
            bias = own[:width].clone().requires_grad_()
            given_s = sums(s)[..., :width].double().sum(0).requires_grad_()
            expected = _ORACLES[function](given_s + factor * bias)
            expected.backward(sums(dz)[..., :width].double().sum(0))
            assert given_s.grad is not None
            assert bias.grad is not None
            torch.testing.assert_close(
                sums(z)[0, :, :width].double(), expected.detach(), rtol=3e-6, atol=2e-6
            )
            torch.testing.assert_close(
                sums(ds)[0, :, :width].double(), given_s.grad, rtol=1e-5, atol=1e-5
            )
            assert not sums(z)[0, :, width : padded(width)].any()
            assert not sums(ds)[0, :, width : padded(width)].any()
            if has[j][slot]:
                (start,) = firsts_of(gradients, j, case.adapters[slot])
                found = gradients.memory[start : start + width].double()
                torch.testing.assert_close(found, bias.grad, rtol=1e-5, atol=1e-4)
                behind = slice(start + width, start + most)
                assert torch.equal(gradients.memory[behind], before[behind])


def test_what_kernels_cannot_take_is_refused() -> None:
    case = Case(((2, 0),), ((1,),), (16,), 16, False, 0)
    vectors = scattered(case.ranks, [0], [16], case.adapters, torch.bfloat16, case.generator)
    y, widths = torch.zeros(2, 16), torch.ones(1, 1, dtype=torch.int32)
    with pytest.raises(CodegenError, match=r"base \(8,\) is no \[16 columns\]"):
        segmented_scale(y, vectors, case.tiles, torch.zeros(8))
    with pytest.raises(CodegenError, match=r"gradients in torch\.bfloat16"):
        segment_inner(y, None, vectors, case.tiles)
    s = torch.zeros(2, 1, 32)
    with pytest.raises(CodegenError, match="activation 'celu'; there are gelu, gelu_new"):
        segmented_activate(s, vectors, widths, case.tiles, "celu")
    with pytest.raises(CodegenError, match="ds of 2 parts"):
        segment_sum(s, vectors, widths, case.tiles)


# ----------------------------------------------------------------------------------- machine code

_VECTORS = "pcg.kernels.triton.adapters.segmented_vectors"
_ACTIVATE = "pcg.kernels.triton.adapters.segmented_activate"
_TYPES = {
    **dict.fromkeys(("y", "dy", "base"), "*bf16"),
    **dict.fromkeys(("stride", "y_stride", "dy_stride"), "i32"),
    **dict.fromkeys(("first", "slices", "slots", "sums"), "i32"),
    **dict.fromkeys(("order", "tiles", "segments", "ranks", "columns", "widths"), "*i32"),
    **dict.fromkeys(("scales", "s", "dz", "ds", "out"), "*fp32"),
    "rows": "*i64",
}
_ODD = ("order", "tiles", "segments", "first", "slices", "slots", "sums")


_VECTOR = {"memory": "*bf16", **_TYPES}
_GRADIENT = {"memory": "*fp32", **_TYPES}
_WIDE = {**_GRADIENT, "y": "*fp32", "dy": "*fp32", "base": "*fp32"}


def _vector(types: dict[str, str], adds: bool, block_m: int, block_n: int) -> Kernel:
    constants = {"HAS_BASE": True, "ADDS": adds, "BLOCK_M": block_m, "BLOCK_N": block_n}
    return Kernel(_VECTORS, "vector_kernel", types, constants, _ODD, 4, 3)


def _inner(types: dict[str, str], has_y: bool) -> Kernel:
    constants = {"HAS_BASE": True, "HAS_SCALES": True, "HAS_Y": has_y, "BLOCK_T": 32, "BLOCK_N": 64}
    return Kernel(_VECTORS, "inner_kernel", types, constants, _ODD, 4, 2)


def _activate(function: str, has_gradient: bool, parts: int, block: int) -> Kernel:
    constants = {
        "FUNCTION": FUNCTIONS[function], "HAS_SCALES": True, "HAS_GRADIENT": has_gradient,
        "PARTS": parts, "GRADIENT_PARTS": parts, "BLOCK_M": block,
        "BLOCK_R": min(32, block), "RANKS": block,
    }  # fmt: skip
    warps = 4 if block > 16 else 1
    return Kernel(_ACTIVATE, "activate_kernel", _VECTOR, constants, _ODD, warps, 3)


def check_code(kernels: Sequence[Kernel]) -> None:
    """AssertionError: code that spills, or loads too little at once."""
    for code in compiled(kernels):
        code.check_in_registers(128 if IS_NEW_TRITON else 144)
        assert code.shared_bytes <= 32 * 1024
        narrow = code.kernel == "activate_kernel" and not IS_NEW_TRITON
        assert code.count("LDG", "128") + code.count("LDGSTS", "128") or narrow, code.kernel
        # A bottleneck's bias is of any width, so it may be loaded one by one.
        assert not code.count("LDG", "U16") or code.kernel == "activate_kernel"


def test_machine_code() -> None:
    check_code(
        [_vector(_VECTOR, False, 64, 64), _inner(_GRADIENT, True), _activate("gelu", True, 1, 64)]
    )


@pytest.mark.slow
def test_machine_code_of_rare_kernels() -> None:
    sums = {"HAS_SCALES": True, "BLOCK_T": 32, "BLOCK_R": 16}
    check_code(
        [
            _vector(_VECTOR, True, 16, 256),
            _vector(_WIDE, False, 64, 64),
            _inner(_GRADIENT, False),
            _inner(_WIDE, True),
            *(_activate(function, True, 8, 64) for function in FUNCTIONS),
            _activate("gelu_new", False, 16, 16),
            Kernel(_ACTIVATE, "sum_kernel", _GRADIENT, sums, _ODD, 4, 2),
        ]
    )
