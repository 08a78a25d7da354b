"""Top-k and top-p without sorting, against the sorted definition; and their machine code."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pcg.kernels.triton import sampling
from pcg.kernels.triton.sampling import draw, greedy, keep, limited
from pcg.runtime.sampling.drawing import Drawing, filtered, limits_of
from pcg.runtime.sampling.sampling import Sampler, sample, scored
from pcg.runtime.sampling.sampling_params import SamplingParams
from tests.support.interpreter.gpu_code import Kernel, compiled
from tests.support.interpreter.sanitizer import sanitized

INF = float("inf")


def sorted_set(x: Tensor, k: int, tail: float) -> tuple[Tensor, float]:
    """The tokens of a row that stay, by sorting in fp64, and how close another set was."""
    kept = x > -INF
    if 0 < k < int(kept.sum()):
        kept &= x >= x.sort(descending=True).values[k - 1]
    if not tail:
        return kept, 1.0
    p = torch.where(kept, x.exp(), 0.0).double().numpy()
    order = np.lexsort((np.arange(len(p)), x.numpy()))
    order = order[kept.numpy()[order]]
    sums = p[order].cumsum() / p.sum()
    goes = sums <= tail
    goes[-1:] = False
    kept[torch.from_numpy(order[goes])] = False
    return kept, float(np.abs(sums[:-1] - tail).min(initial=1.0))


@settings(max_examples=20)
@given(
    vocabulary=st.integers(1, 100),
    levels=st.sampled_from([1, 3, 40, 100000]),
    removed=st.sampled_from([0.0, 0.6, 1.0]),
    k=st.sampled_from([0, 1, 2, 7, 40, 200]),
    top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]),
    temperature=st.sampled_from([1e-30, 0.3, 1.0, 50.0]),
    block=st.sampled_from([16, 4096]),
)
def test_the_set_is_that_of_sorting(
    vocabulary: int, levels: int, removed: float, k: int, top_p: float, temperature: float,
    block: int,
) -> None:  # fmt: skip
    """With few levels most tokens are equally likely; of -inf alone nothing stays."""
    torch.manual_seed(vocabulary)
    logits = torch.randint(-levels, levels, (2, vocabulary)) * (8 / levels)
    logits = logits.masked_fill(torch.rand(logits.shape) < removed, -INF)
    params = SamplingParams(temperature=temperature, top_k=k or None, top_p=top_p)
    limits = limits_of([params] * 2, logits)
    with sanitized(), mock.patch.object(sampling, "SEARCH_BLOCK", block):
        least, last = limited(logits, limits)
    top = logits.amax(-1, keepdim=True).clamp(min=-1e30)
    x = (logits - top) / limits.temperatures[:, None]
    at = (x == least[:, None]) & (torch.arange(vocabulary) > last[:, None])
    for row in range(2):
        wanted, margin = sorted_set(x[row], int(limits.top_k[row]), float(limits.tails[row]))
        assume(margin > 1e-6)
        assert torch.equal(((x > least[:, None]) | at)[row] & (x[row] > -INF), wanted)


def test_of_equally_likely_tokens_the_last_stay() -> None:
    """As a stable sort has it: half of eight tokens, and what is left of two values."""
    logits = torch.tensor([[1.0] * 8, [0.0, 2.0, 0.0, 2.0, 0.0, 2.0, 0.0, 2.0]])
    params = [SamplingParams(temperature=1.0, top_p=p) for p in (0.5, 0.6)]
    kept = filtered(logits, params).isfinite()
    assert kept.int().tolist() == [[0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 0, 1, 0, 1]]
    least, last = limited(logits, limits_of(params, logits))
    assert least.tolist() == [0.0, 0.0]
    assert last.tolist() == [3, 1]


def test_requests_draw_the_tokens_that_they_draw_by_sorting() -> None:
    """Each with its own limits and seed; a row of NaN is undrawn, and no one else's matter."""
    torch.manual_seed(0)
    logits = 3 * torch.randn(24, 400)
    logits[7, 3] = float("nan")
    params = [
        SamplingParams(
            temperature=0.5 + row / 24,
            seed=row,
            top_k=(None, 5, 50)[row % 3],
            top_p=(None, 0.9, 0.4, 1.0)[row % 4],
            min_p=(None, 0.02)[row % 2],
        )
        for row in range(24)
    ]
    kernels = Drawing.by_kernels(greedy, draw, keep)
    with np.errstate(invalid="ignore"):
        found = sample(logits, [Sampler(each) for each in params], kernels)
    assert torch.equal(found, sample(logits, [Sampler(each) for each in params]))
    assert found[7] == -1


def test_processed_logprobs_are_of_the_same_tokens_without_sorting() -> None:
    """Among rows that ask for raw ones, and a greedy one; a row of NaN stays one."""
    torch.manual_seed(0)
    logits = 3 * torch.randn(24, 400)
    logits[7, 3] = float("nan")
    samplers = [
        Sampler(
            SamplingParams(
                temperature=0.0 if row == 4 else 0.5 + row / 24,
                top_k=(None, 5, 50)[row % 3],
                top_p=(None, 0.9, 0.4, 1.0)[row % 4],
                min_p=(None, 0.02)[row % 2],
                logprobs_mode="raw_logprobs" if row % 5 == 0 else "processed_logprobs",
            )
        )
        for row in range(24)
    ]
    wanted = scored(logits, samplers).log_softmax(-1)
    with mock.patch.object(torch.Tensor, "sort", None), np.errstate(invalid="ignore"):
        found = scored(logits, samplers, Drawing.by_kernels(greedy, draw, keep)).log_softmax(-1)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5, equal_nan=True)
    assert found[7].isnan().any()
    assert (found[16] == -INF).sum() == 395  # top_k=5 alone
    assert torch.equal(found[5], logits[5].log_softmax(-1))


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    """At evenly spaced numbers u, each as often as what sorting leaves of its probability."""
    logits, count = torch.tensor([[2.0, 0.0, 1.0, -1.0, 1.5, 0.5, -3.0]]).repeat(24, 1), 24
    params = SamplingParams(temperature=0.8, top_k=5, top_p=0.95)
    uniform = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    tokens, are_drawn = draw(logits, limits_of([params] * count, logits), uniform)
    assert are_drawn.all()
    expected = filtered(logits[:1], [params])[0].softmax(-1)
    assert (expected == 0).sum() == 3
    found = tokens.bincount(minlength=7) / count
    assert (found - expected).abs().max() <= 1 / count


@pytest.mark.slow
def test_machine_code() -> None:
    signature = {
        "logits": "*fp32", "temperatures": "*fp32", "top_k": "*fp32", "tails": "*fp32",
        "least": "*fp32", "last": "*i32", "V": "i32", "stride": "i32",
    }  # fmt: skip
    constants = {"BLOCK": sampling.SEARCH_BLOCK}
    kernel = Kernel(sampling.__name__, "limit_rows", signature, constants, warps=32)
    for code in compiled([kernel]):
        code.check_in_registers(64)  # of 65,536 that 1,024 threads share
        assert code.count("LDG", "128") >= 8


def test_rows_without_limits_take_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "limited", None)
    logits = torch.zeros(2, 30)
    limits = limits_of([SamplingParams(temperature=1.0, min_p=0.5)] * 2, logits)
    assert draw(logits, limits, torch.full((2,), 0.5, dtype=torch.float64))[0].tolist() == [15, 15]
