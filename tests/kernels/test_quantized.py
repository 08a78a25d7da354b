"""Products by 4-bit codes on GPUs, against the formats' dequantized matrices in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pcg.formats.registry import FORMATS
from pcg.kernels.triton.quantized import TritonProducts, constants_of
from tests.support.interpreter import bf16
from tests.support.interpreter.gpu_code import IS_NEW_TRITON, Kernel, compiled
from tests.support.interpreter.sanitizer import sanitized
from tests.support.parameters import mostly_slow

bf16.install()
NAMES = ("nf4", "nf4_single", "fp4", "int4_g32", "int4_row", "mxfp4", "nvfp4")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}


def drawn(rows: int, columns: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (0.3 * torch.randn(rows, columns, generator=generator)).to(dtype)


@pytest.mark.parametrize("name", NAMES)
@given(
    tokens=st.integers(1, 70),
    rows=st.integers(1, 150),
    blocks=st.integers(1, 3),
    dtype=st.sampled_from(list(TOLERANCE)),
    data=st.data(),
)
@settings(max_examples=12)
def test_products_are_those_of_the_dequantized_matrix(
    name: str, tokens: int, rows: int, blocks: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    format_, columns = FORMATS[name], 64 * blocks
    parts = format_.quantize(drawn(rows + 3, columns + 64, 0))
    first = data.draw(st.sampled_from([0, 64])) if name != "int4_row" else 0
    last = columns + (first if name != "int4_row" else 64)
    parts = format_.cut(parts, (2, rows + 2), (first, last))
    lookup = format_.lookup(parts)
    assert lookup is not None
    weight = format_.whole(parts, dtype).double()
    x, dy = drawn(tokens, last - first, 1, dtype), drawn(tokens, rows, 2, dtype)
    y = torch.full((tokens, rows + 5), 7.0, dtype=dtype)
    before = drawn(tokens, last - first, 3)
    dx = before.clone()
    with sanitized():
        TritonProducts().linear(x, lookup, y[:, 2 : rows + 2])
        TritonProducts().input_gradient(dy, lookup, dx)
    expected = x.double() @ weight.t()
    error = (y[:, 2 : rows + 2].double() - expected).abs().max() / expected.abs().max()
    assert error < TOLERANCE[dtype]
    assert (y[:, :2] == 7).all()
    assert (y[:, rows + 2 :] == 7).all()
    added = dy.double() @ weight
    assert (dx.double() - before - added).abs().max() / added.abs().max() < 1e-5


ABSENT = {
    "nf4": ("zeros",),
    "int4_g128": ("values", "scale_values", "nested"),
    "mxfp4": ("zeros", "nested"),
}


def kernel(function: str, name: str, tokens: int) -> Kernel:
    format_ = FORMATS[name]
    lookup = format_.lookup(format_.quantize(drawn(64, 256, 0)))
    assert lookup is not None
    ends = ("x", "y") if function == "linear" else ("dy", "dx")
    signature = {ends[0]: "*bf16", ends[1]: "*bf16" if function == "linear" else "*fp32"}
    sizes = ("T", "N", "K", f"{ends[0]}_stride", f"{ends[1]}_stride")
    tables = {
        "codes": "*u8",
        "scales": "*fp16" if name.startswith("int4") else "*u8",
        "values": "*fp32",
        "zeros": "*u8",
        "scale_values": "*fp32",
        "nested": "*fp32",
    }
    tables |= dict.fromkeys(ABSENT[name], "*u8")  # the codes stand for them
    signature |= dict.fromkeys(sizes, "i32") | tables
    signature |= {"offset": "fp32", "first": "i32", "row_blocks": "i32"}
    constants = constants_of(lookup) | {"TOKENS": tokens, "ROWS": 64, "COLUMNS": 64}
    odd = ("T", "first", "row_blocks")
    return Kernel("pcg.kernels.triton.quantized", function, signature, constants, odd)


@pytest.mark.parametrize(
    ("name", "tokens"), mostly_slow(itertools.product(ABSENT, (16, 64)), ("nf4", 64))
)
def test_machine_code_multiplies_by_tensor_cores_without_spills(name: str, tokens: int) -> None:
    kernels = [kernel(function, name, tokens) for function in ("linear", "input_gradient")]
    for code in compiled(kernels):
        # Triton 3.6 spills up to some hundred bytes of the tiles that linear dequantizes.
        assert code.stack_bytes == 0 or not IS_NEW_TRITON, code
        products = [name for name in code.instructions if name.startswith(("HMMA", "HGMMA"))]
        assert products, code
