"""Products that several functions ask for: run as one where they are the same, and only there."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from weakref import ref

import pytest
import torch
from torch import Tensor

from pcg.kernels.torch.products import has_onednn, linear, linear_backward, linear_group, product
from pcg.runtime.model.bound_weights import ProductLayout
from pcg.runtime.model.merged_execution import ProductRequest, run_merged


def laid_out(weight: Tensor, bias: Tensor) -> Tensor:
    """A weight as serving has it, with its bias."""
    whole = weight.detach()
    whole.group_sizes = [len(weight)]  # type: ignore[attr-defined]
    whole.group_bias = bias  # type: ignore[attr-defined]
    return whole


@pytest.mark.parametrize("is_laid_out", [False, True])
def test_a_bias_is_added_where_it_is_asked_for(is_laid_out: bool) -> None:
    """Of one weight, in one round, as dropout asks for a product without the bias, too."""
    weight, bias = torch.randn(3, 4), torch.randn(3)
    held = laid_out(weight, bias) if is_laid_out else weight
    inputs = torch.randn(2, 5, 4)
    expected = [inputs[0] @ weight.t() + bias, inputs[1] @ weight.t()]
    batch = SimpleNamespace(layer=0, is_alone=False)

    def ask(x: Tensor, biases: tuple[Tensor, ...]) -> ProductRequest[Tensor]:
        (y,) = yield from product(batch, "w", x, (held,), biases)
        return y

    found = run_merged([ask(inputs[0], (bias,)), ask(inputs[1], ())])
    alone = [linear_group(x, (held,), own)[0] for x, own in zip(inputs, ((bias,), ()), strict=True)]
    for ours, ones, wanted in zip(found, alone, expected, strict=True):
        torch.testing.assert_close(ours, wanted)
        torch.testing.assert_close(ones, wanted)


def test_a_weight_is_freed_without_the_garbage_collector() -> None:
    weight = torch.randn(8, 16)
    linear(torch.randn(1, 16), weight)
    held = ref(weight)
    gc.disable()
    try:
        del weight
        assert held() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("tokens", [1, 63, 64, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_by_plain_weights_are_those_of_float64(dtype: torch.dtype, tokens: int) -> None:
    """Whichever library runs them; rows of a larger matrix, as of a rank's shard, too."""
    torch.manual_seed(0)
    weights = torch.randn(70, 48, dtype=dtype)
    x, bias = torch.randn(tokens, 48, dtype=dtype), torch.randn(70, dtype=dtype)
    dy = torch.randn(tokens, 70, dtype=dtype)
    for rows in (slice(0, 70), slice(16, 48)):
        weight, wide = weights[rows], weights[rows].double()
        y, dx = linear(x, weight, bias[rows]), linear_backward(dy[:, rows], weight)
        assert y.dtype == dx.dtype == dtype
        bound = 60 * torch.finfo(dtype).eps
        torch.testing.assert_close(
            y.double(), x.double() @ wide.t() + bias[rows].double(), rtol=bound, atol=bound
        )
        torch.testing.assert_close(dx.double(), dy[:, rows].double() @ wide, rtol=bound, atol=bound)
        assert torch.equal(linear(x, weight, bias[rows]), y)  # a resumed run repeats the first
        assert torch.equal(linear_backward(dy[:, rows], weight), dx)


@pytest.mark.skipif(not has_onednn(torch.float32), reason="oneDNN packs no weights here")
@pytest.mark.parametrize("tokens", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_or_two_by_the_parts_of_a_packed_weight(dtype: torch.dtype, tokens: int) -> None:
    """The parts lie apart in memory, and their sizes are no multiples of a tile or of lanes."""
    parts = [torch.randn(rows, 77, dtype=dtype) for rows in (5, 64, 130)]
    x, bias = torch.randn(tokens, 77, dtype=dtype), torch.randn(199, dtype=dtype)
    packed = ProductLayout(packs=True).lay_out("key", parts, ())
    with torch.inference_mode():
        wanted = x.double() @ torch.cat(parts).double().t()
        bound = 0.01 if dtype is torch.bfloat16 else 1e-5
        for found, whole in (
            (linear(x, packed), wanted),
            (linear(x, packed, bias), wanted + bias),
            (linear(x, torch.cat(parts)), wanted),
            (linear(x, parts[1].t().contiguous().t()), wanted[:, 5:69]),
        ):
            torch.testing.assert_close(found.double(), whole, rtol=bound, atol=10 * bound)
    weight = parts[1].requires_grad_()
    linear(x, weight).sum().backward()
    assert weight.grad is not None
