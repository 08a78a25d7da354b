"""Kernels on a device, against fp64: `TRITON_INTERPRET=0 pytest -m gpu`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pcg.compiler as compiler
from pcg.kernels.batch import TokenLimits
from pcg.kernels.triton.elementwise import pack_signs, relu_backward_packed
from pcg.kernels.triton.linear_cross_entropy import linear_cross_entropy
from pcg.kernels.triton.sampling import draw, greedy, keep
from pcg.runtime.sampling.drawing import Drawing, filtered
from pcg.runtime.sampling.sampling import Sampler, sample
from pcg.runtime.sampling.sampling_params import SamplingParams
from tests.support import on_device, oracle
from tests.support.append_cases import check_cache
from tests.support.families import BY_NAME
from tests.support.on_device import DEVICE
from tests.support.prompts import prompts

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import gpu_kernels
from gpu_bench import Bench, Ceilings, CudaTimer, Once

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "0",
        reason="kernels are interpreted in this process; set TRITON_INTERPRET=0",
    ),
]

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def check(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    """To so much of the largest."""
    error = (found.double() - wanted).abs().max() / wanted.abs().max()
    assert error <= tolerance, f"off by {float(error):.1e} of the largest"


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("vocabulary", [32_000, 50_257])
@pytest.mark.parametrize("softcap", [0.0, 30.0])
def test_linear_cross_entropy(dtype: torch.dtype, vocabulary: int, softcap: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(300, 256, device=DEVICE, dtype=dtype)
    weight = (torch.randn(vocabulary, 256, device=DEVICE) / 8).to(dtype)
    targets = torch.randint(vocabulary, (300,), device=DEVICE)
    targets[::7] = -100
    dloss = torch.rand(300, device=DEVICE) + 0.5
    loss, dx = linear_cross_entropy(x, weight, targets, dloss, softcap=softcap, chunk=128)
    leaf = x.double().requires_grad_()
    logits = leaf @ weight.double().t()
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    wanted = F.cross_entropy(logits, targets, reduction="none")
    wanted.backward(dloss.double())
    assert dx is not None
    assert leaf.grad is not None
    check(loss, wanted.detach(), TOLERANCE[dtype])
    check(dx, leaf.grad, TOLERANCE[dtype])
    assert not dx[::7].any()
    again = linear_cross_entropy(x, weight, targets, dloss, softcap=softcap, chunk=128)
    assert torch.equal(again[0], loss)  # sums are in a fixed order


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sign_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    y, dy = torch.randn(2, 1000, 1384, device=DEVICE).to(dtype)
    signs = pack_signs(y)
    bits = (signs[..., None] >> torch.arange(8, device=DEVICE, dtype=torch.uint8)) & 1
    assert torch.equal(bits.flatten(-2) == 1, y > 0)
    assert torch.equal(relu_backward_packed(dy, signs), dy.masked_fill(y <= 0, 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocabulary", [128_256, 50_257])
def test_the_most_likely_token(dtype: torch.dtype, vocabulary: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(33, vocabulary, device=DEVICE).to(dtype)
    first = torch.stack([(row == row.max()).nonzero()[0, 0] for row in logits])
    assert torch.equal(greedy(logits), first)


@pytest.mark.parametrize("vocabulary", [128_256, 50_257])
def test_drawn_tokens(vocabulary: int) -> None:
    torch.manual_seed(0)
    logits = 3 * torch.randn(64, vocabulary, device=DEVICE)
    uniform = torch.rand(64, device=DEVICE, dtype=torch.float64)
    temperatures = torch.linspace(0.3, 2, 64, device=DEVICE)
    logits[5, 7] = float("nan")
    none = torch.zeros_like(temperatures)
    tokens, are_drawn = draw(logits, TokenLimits(temperatures, none, none, none, False), uniform)
    assert are_drawn.tolist() == [row != 5 for row in range(64)]
    p = torch.softmax(logits.double() / temperatures[:, None], -1)[are_drawn]
    own = tokens[are_drawn, None]
    after, at = p.cumsum(-1).gather(1, own)[:, 0], p.gather(1, own)[:, 0]
    assert (at > 0).all()
    assert (after - at <= uniform[are_drawn] + 1e-6).all()
    assert (after >= uniform[are_drawn] - 1e-6).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tokens_drawn_within_limits(dtype: torch.dtype) -> None:
    """The tokens that sorting leaves; in bf16 many are equally likely."""
    torch.manual_seed(0)
    logits = (3 * torch.randn(64, 128_256, device=DEVICE)).to(dtype).float()
    params = [
        SamplingParams(temperature=0.7, seed=row, top_k=(None, 50)[row % 2], top_p=0.9)
        for row in range(64)
    ]
    kernels = Drawing.by_kernels(greedy, draw, keep)
    found = sample(logits, [Sampler(each) for each in params], kernels)
    wanted = sample(logits, [Sampler(each) for each in params])
    assert (found == wanted).double().mean() > 0.95  # a point may lie within rounding of a border
    kept = filtered(logits, params).isfinite()
    assert kept.gather(1, found[:, None]).double().mean() > 0.95


@pytest.mark.parametrize(
    ("name", "changes"), [("llama3", {}), ("qwen3", {"head_dim": 16}), ("gpt_neox", {})]
)
def test_what_kernels_append_to_the_cache(name: str, changes: dict[str, int]) -> None:
    base = oracle.random_model(BY_NAME[name].config(2, **changes))
    executor = compiler.compile(base, backend="triton", device=torch.device(DEVICE))
    check_cache(base, executor, prompts((21, 5, 18)), in_pages=True)


BENCH = Bench(Once(), Ceilings(1.0, 1.0, 1.0))
"""Cases of the benchmark compare with fp64 before they measure."""


@pytest.mark.parametrize("popularity", ["distinct", "uniform", "skewed", "identical"])
@pytest.mark.parametrize("batch", [1, 7, 64])
def test_segmented_lora(popularity: str, batch: int) -> None:
    gpu_kernels.lora(BENCH, popularity, batch)


@pytest.mark.parametrize(
    ("batch", "tokens", "keys"), [(1, 1, 4096), (16, 1, 1008), (1, 1024, 1024), (4, 512, 512)]
)
def test_paged_attention(batch: int, tokens: int, keys: int) -> None:
    gpu_kernels.attention(BENCH, batch, tokens, keys)


def test_the_benchmarks_timer() -> None:
    """Copies, one by one or recorded, take longer than any GPU's memory could."""
    tensors = torch.randn(5, 2**26, device=DEVICE)  # 256 MiB each
    timer = CudaTimer(seconds=0.05, most=10)

    def copies() -> None:
        for i in range(4):
            tensors[i].copy_(tensors[4])

    for captured in (False, True):
        copy_us = timer.median_us(copies, captured, times=4)
        assert 2 * tensors[0].nbytes / copy_us * 1e6 < 20e12


@pytest.mark.parametrize("name", ["llama3", "gemma2", "opt", "gpt2"])
def test_whole_programs(name: str, tmp_path: Path) -> None:
    on_device.whole_programs(name, tmp_path)


def test_rows_of_adapters() -> None:
    on_device.rows_of_adapters()


def test_recorded_steps() -> None:
    on_device.recorded_steps()


def test_a_step_waits_for_nothing() -> None:
    on_device.a_step_waits_for_nothing()


def test_an_engine_replays_its_steps() -> None:
    on_device.an_engine_replays_its_steps()


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_backward_units_run_beside_the_forward(backend: str) -> None:
    on_device.backward_units_run_beside_the_forward(backend)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_adapters_are_copied_from_the_host_beside_steps(backend: str) -> None:
    on_device.adapters_are_copied_from_the_host_beside_steps(backend)


def test_windows_are_recorded() -> None:
    on_device.windows_are_recorded()


def test_jobs_find_windows_that_are_recorded() -> None:
    on_device.jobs_find_windows_that_are_recorded()


def test_a_copy_to_the_host_waits_once() -> None:
    on_device.a_copy_to_the_host_waits_once()
