"""The native kernel against PyTorch's operators, which the formats' own libraries are tested by."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from pcg.formats import native
from pcg.formats.format import Parts
from pcg.formats.registry import FORMATS
from pcg.kernels.torch.experts import expert_linear
from pcg.kernels.torch.products import linear, stand_in_tensor
from pcg.kernels.torch.quantized import Block, QuantizedWeight, expert_matrices
from pcg.native_library import processor

CPU = torch.device("cpu")
NAMES = [*FORMATS, "int4_g96"]
DTYPES = (torch.float32, torch.bfloat16)
ERROR = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
"""Of a product, relative to its largest output: of another order of sums, and of rounding."""


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CXX", "")
    native._library.cache_clear()
    yield
    native._library.cache_clear()


@pytest.fixture(params=["", "-mno-avx512f"], ids=["widest", "avx2"], scope="module", autouse=True)
def flag(request: pytest.FixtureRequest) -> Iterator[None]:
    """Have the kernel compiled for the processor, and again for one without AVX-512."""
    if request.param and "avx512bw" not in processor():
        pytest.skip("the processor has no AVX-512 in any case")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "_FLAGS", (*native._FLAGS, *request.param.split()))
        forget_library()
        yield
    forget_library()


def forget_library() -> None:
    native._library.cache_clear()
    native._function.cache_clear()


needs_kernel = pytest.mark.skipif(
    not native.is_native(CPU), reason="there is no C++ compiler, or no AVX2"
)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def matrix(name: str, rows: int, columns: int, seed: int = 0) -> Parts:
    """A random matrix; of a format that pcg only reads, random blocks with scales near 0.01."""
    format_ = FORMATS[name]
    if name not in ("q4_k", "q6_k"):
        return format_.packed(format_.quantize(0.05 * drawn(rows, columns, seed=seed)))
    (shape, dtype) = format_.tensors(rows, columns)["blocks"]
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, shape, dtype=dtype, generator=generator).view(
        rows, columns // 256, -1
    )
    halves = (0.01 * drawn(rows, columns // 256, 2, seed=seed)).half().view(torch.uint8)
    place = slice(0, 4) if name == "q4_k" else slice(208, 210)
    blocks[..., place] = halves[..., : place.stop - place.start]
    return Parts({"blocks": blocks.view(rows, -1)}, rows, columns)


def columns_of(name: str, blocks: int, tail: int) -> int:
    """Columns that the format stores, with a part of a block where it has such."""
    format_ = FORMATS[name]
    size = format_.column_block
    return blocks * size + (tail % size if format_.has_partial_blocks or size == 1 else 0)


sizes = st.tuples(
    st.sampled_from(NAMES), st.integers(1, 9), st.integers(1, 5), st.integers(1, 127),
    st.sampled_from(DTYPES), st.integers(0, 5),
)  # fmt: skip


@needs_kernel
@given(sizes)
def test_dequantized_rows_are_those_of_pytorch(
    size: tuple[str, int, int, int, torch.dtype, int],
) -> None:
    name, rows, blocks, tail, dtype, seed = size
    columns = columns_of(name, blocks, tail)
    parts, format_ = matrix(name, rows, columns, seed), FORMATS[name]
    start = seed % rows
    expected = torch.empty(rows - start, columns, dtype=dtype)
    format_.dequantize(parts, start, rows, expected)
    found = torch.full_like(expected, torch.nan)
    format_.write_rows(parts, start, rows, found)
    assert torch.equal(expected.view(torch.uint8), found.view(torch.uint8))
    assert format_.matrix(parts) is not None or name.endswith("_act")


@needs_kernel
@given(sizes, st.integers(1, 9), st.integers(0, 3))
def test_products_are_those_of_pytorch(
    size: tuple[str, int, int, int, torch.dtype, int], tokens: int, padding: int
) -> None:
    name, rows, blocks, tail, dtype, seed = size
    columns = columns_of(name, blocks, tail)
    parts, format_ = matrix(name, rows, columns, seed), FORMATS[name]
    matrices = native.joined([format_.matrix(parts)])
    assume(matrices is not None)
    assert matrices is not None
    x = drawn(tokens, columns + padding, seed=seed)[:, :columns]
    x[seed % 3 :: 2, seed % columns] *= 400  # int8 rounds such tokens twice
    x = x.to(dtype)
    expected = torch.empty(tokens, rows, dtype=dtype)
    format_.linear(parts, x, expected, 0, rows)
    y = torch.full((tokens, rows + padding), torch.nan, dtype=dtype)
    assert matrices.multiply(x, y[:, :rows])
    assert y[:, rows:].isnan().all()
    if name == "int8":
        assert torch.equal(y[:, :rows], expected)
    torch.testing.assert_close(
        y[:, :rows], expected, rtol=0, atol=ERROR[dtype] * max(1.0, float(expected.abs().max()))
    )


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_a_token_has_the_same_bits_in_any_batch(name: str, dtype: torch.dtype) -> None:
    # More columns and tokens than the kernel takes at a time.
    columns = columns_of(name, 2304 // FORMATS[name].column_block, 37)
    parts = matrix(name, 37, columns)
    matrices = native.joined([FORMATS[name].matrix(parts)])
    if matrices is None:
        pytest.skip("PyTorch multiplies by it")
    x = drawn(270, columns)
    x[::3, 5] *= 400
    x = x.to(dtype)
    whole = torch.empty(270, 37, dtype=dtype)
    assert matrices.multiply(x, whole)
    for start, stop in ((0, 1), (3, 5), (10, 13), (20, 28), (30, 39), (100, 229), (269, 270)):
        part = torch.empty(stop - start, 37, dtype=dtype)
        assert matrices.multiply(x[start:stop], part)
        assert torch.equal(part, whole[start:stop])


@needs_kernel
@pytest.mark.parametrize("name", ["int8", "nf4"])
def test_threads_change_no_bit(name: str) -> None:
    matrices = native.joined([FORMATS[name].matrix(matrix(name, 37, 256))])
    assert matrices is not None
    x, threads = drawn(9, 256), torch.get_num_threads()
    results = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            results.append(torch.empty(9, 37))
            assert matrices.multiply(x, results[-1])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*results)


@needs_kernel
def test_int8_of_many_columns_and_extreme_inputs_is_that_of_pytorch() -> None:
    parts, format_ = matrix("int8", 6, 4100), FORMATS["int8"]
    outlier = drawn(4100).index_fill(0, torch.tensor([7]), 1e3)
    x = torch.stack(
        [drawn(4100), torch.zeros(4100), torch.full((4100,), 1e-42), 1e30 * drawn(4100), outlier]
    )
    expected, y = torch.empty(5, 6), torch.empty(5, 6)
    format_.linear(parts, x, expected, 0, 6)
    matrices = native.joined([format_.matrix(parts)])
    assert matrices is not None
    assert matrices.multiply(x, y)
    assert torch.equal(y, expected)


@needs_kernel
def test_weights_below_each_other_are_multiplied_at_once() -> None:
    weights = [
        QuantizedWeight((Block(FORMATS[name], matrix(name, rows, 128, rows)),))
        for name, rows in (("int8", 5), ("nf4", 8), ("int8", 3), ("int4_g64_act", 2))
    ]
    x = drawn(3, 128)
    for others in (weights[1:3], weights[1:]):
        whole = weights[0].linear(x, others)
        parts = [weight.linear(x, ()) for weight in (weights[0], *others)]
        torch.testing.assert_close(whole, torch.cat(parts, 1), rtol=2e-6, atol=2e-6)
    assert weights[0].joined(weights[1:]) is weights[0].joined(weights[1:])


@needs_kernel
@pytest.mark.parametrize("name", ["float", "nf4", "int8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(tokens=st.integers(1, 40), shares=st.booleans(), experts=st.integers(1, 6))
def test_experts_are_multiplied_at_once(
    name: str, dtype: torch.dtype, tokens: int, shares: bool, experts: int
) -> None:
    """Each choice has the product of its expert, for a row of a token or of a choice."""
    k, out, size = min(3, experts), 37, 101 if name == "float" else 128
    indices = drawn(tokens, experts, seed=tokens).topk(k).indices
    x = drawn(*((tokens,) if shares else (tokens, k)), size, seed=1).to(dtype)
    bias = drawn(experts, out, 1, seed=2).to(dtype)
    every = [0.05 * drawn(out, size, seed=10 + expert) for expert in range(experts)]
    if name == "float":
        weight = torch.stack(every).to(dtype)
        assert native.reads(weight)
    else:
        format_ = FORMATS[name]
        blocks = [Block(format_, format_.packed(format_.quantize(each))) for each in every]
        weight = stand_in_tensor((experts, out, size), dtype, QuantizedWeight(tuple(blocks)))
    y = expert_linear(x, indices, weight, bias)
    rows = x.unsqueeze(1).expand(tokens, k, size) if shares else x
    matrices = expert_matrices(weight)
    expected = torch.stack(
        [
            linear(row.unsqueeze(0), matrices[expert], bias[expert].view(-1))
            for row, expert in zip(rows.flatten(0, 1), indices.flatten().tolist(), strict=True)
        ]
    ).view(tokens, k, out)
    error = (y - expected).abs().max() / expected.abs().max()
    assert error < ERROR[dtype]


@needs_kernel
def test_half_precision_and_strided_columns_are_left_to_pytorch() -> None:
    parts = matrix("nf4", 4, 128)
    matrices = native.joined([FORMATS["nf4"].matrix(parts)])
    assert matrices is not None
    y = torch.empty(2, 4)
    assert not matrices.multiply(drawn(2, 128).half(), y.half())
    assert not matrices.multiply(drawn(128, 2).t(), y)
    whole = FORMATS["nf4"].whole(parts, torch.float16)
    assert torch.equal(whole, FORMATS["nf4"].whole(parts, torch.float32).half())


def test_without_a_compiler_pytorch_multiplies_and_it_is_said_once(
    no_compiler: None, caplog: pytest.LogCaptureFixture
) -> None:
    x = drawn(3, 128)
    with caplog.at_level(logging.WARNING, "pcg.kernels"):
        for name in ("int8", "nf4"):
            parts = matrix(name, 5, 128)
            weight = QuantizedWeight((Block(FORMATS[name], parts),))
            assert FORMATS[name].matrix(parts) is None
            y = torch.empty(3, 5)
            FORMATS[name].linear(parts, x, y, 0, 5)
            assert torch.equal(weight.linear(x, ()), y)
    (record,) = caplog.records
    assert "CXX is empty" in record.getMessage()
