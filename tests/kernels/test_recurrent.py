"""Short convolutions and recurrences over ragged batches and windows, against their definitions.

Sequences are shorter and longer than a chunk, of 64 tokens, or 16 with a decay of each channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pcg.kernels.batch import Span
from pcg.kernels.torch import ops as K
from pcg.runtime.memory.recurrent_states import Boundary, WindowStates
from tests.support import attention_libraries

LENGTHS = (150, 1, 64, 1, 33, 64)
CUTS = ((313,), (1, 312), (64, 86, 1, 64, 1, 33, 64), (17, 200, 3, 93), (149, 2, 162))
HEADS, GROUPS, KEYS, VALUES, TAPS = 4, 2, 3, 5, 4


def batch_of(start: int, stop: int, states: Any) -> Any:
    """The tokens from `start` to `stop` of all sequences, one behind the other."""
    spans: list[Span] = []
    at = 0
    for end in accumulate(LENGTHS):
        first, last = max(at, start), min(end, stop)
        if first < last:
            spans.append(Span(first - start, last - first, first - at))
        at = end
    ids = torch.zeros(stop - start, dtype=torch.int64)
    longer = [span for span in spans if span.length > 1]
    return SimpleNamespace(
        spans=spans, longer_spans=longer, input_ids=ids, known={}, states=states, layer=2
    )


def run(
    op: str,
    inputs: Sequence[Tensor],
    rest: Sequence[Tensor],
    dout: Tensor,
    cut: Sequence[int],
    **options: Any,
) -> list[Tensor]:
    """The output and the gradients of `inputs`, computed window by window."""
    places = [0, *accumulate(cut)]
    ends = {*accumulate(LENGTHS)}
    boundaries = [None if place in {0, *ends} else Boundary() for place in places]
    windows = []
    outs = []
    for number, (start, stop) in enumerate(pairwise(places)):
        states = WindowStates(boundaries[number], boundaries[number + 1], keeps=True)
        windows.append(batch_of(start, stop, states))
        part = [x[start:stop] for x in inputs]
        outs.append(getattr(K, op)(windows[-1], 0, *part, *rest, **options))
    gradients: list[list[Tensor]] = []
    for batch, start, stop in reversed(list(zip(windows, places, places[1:], strict=False))):
        saved = [x[start:stop] for x in inputs] if op == "recurrence" else rest[:1]
        found = getattr(K, f"{op}_backward")(batch, 0, dout[start:stop], *saved, **options)
        gradients.insert(0, list(found) if isinstance(found, tuple) else [found])
    held = [*(b.states for b in boundaries if b), *(b.gradients for b in boundaries if b)]
    assert not any(held[: len(held) // 2])
    return [torch.cat(outs), *(torch.cat(parts) for parts in zip(*gradients, strict=True))]


def by_sequence(function: Any, *inputs: Tensor) -> Tensor:
    """The definition of each sequence, joined."""
    parts = zip(*(x.split(LENGTHS) for x in inputs), strict=True)
    return torch.cat([function(*part) for part in parts])


def recurred(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None = None) -> Tensor:
    state = v.new_zeros(HEADS, KEYS, VALUES)
    q, k = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (q, k))
    outs = []
    for t in range(len(v)):
        state = decay[t].exp().view(HEADS, -1, 1) * state
        u = v[t]
        if beta is not None:
            u = beta[t, :, None] * (u - torch.einsum("hkv,hk->hv", state, k[t]))
        state = state + torch.einsum("hk,hv->hkv", k[t], u)
        outs.append(torch.einsum("hkv,hk->hv", state, q[t]))
    return torch.stack(outs)


def drawn(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(LENGTHS), *shape, dtype=torch.float64, generator=generator)


def check(
    found: Sequence[Tensor], expected: Tensor, inputs: Sequence[Tensor], error: float = 1e-9
) -> None:
    dout = drawn(*expected.shape[1:], seed=9)
    wanted = [expected.detach(), *torch.autograd.grad(expected, inputs, dout)]
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=error, atol=error / 100)


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("kind", ["state space", "delta rule", "Kimi's delta rule"])
def test_a_recurrence_in_windows(kind: str, cut: Sequence[int]) -> None:
    of_channels = (KEYS,) if kind.startswith("Kimi") else ()
    q, k = (F.normalize(drawn(GROUPS, KEYS, seed=seed), dim=-1) for seed in (1, 2))
    decay = -drawn(HEADS, *of_channels, seed=4).abs()
    inputs = [q, k, drawn(HEADS, VALUES, seed=3), decay]
    if kind != "state space":
        inputs.append(drawn(HEADS, seed=5).sigmoid())
    leaves = [x.requires_grad_() for x in inputs]
    expected = by_sequence(recurred, *leaves)
    with torch.no_grad():
        found = run("recurrence", inputs, (), drawn(HEADS, VALUES, seed=9), cut)
    check(found, expected, leaves)


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("library", [None, "causal_conv1d"])
def test_a_short_convolution_in_windows(
    library: str | None, has_bias: bool, cut: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library computes in fp32, and windows of several tokens alone."""
    calls = attention_libraries.install(monkeypatch)
    x = drawn(8, seed=1).requires_grad_()
    weight, bias = drawn(TAPS, seed=2)[:8], drawn(seed=3)[:8] if has_bias else None

    def convolved(x: Tensor) -> Tensor:
        padded = F.pad(x.T, (TAPS - 1, 0))
        return F.conv1d(padded, weight[:, None], bias, groups=8).T

    rest = [weight] if bias is None else [weight, bias]
    dtype = torch.float32 if library else torch.float64
    given = [tensor.to(dtype) for tensor in (x, *rest, drawn(8, seed=9))]
    with torch.no_grad():
        found = run("short_convolution", given[:1], given[1:-1], given[-1], cut, library=library)
    error = 1e-4 if library else 1e-9
    check([tensor.double() for tensor in found], by_sequence(convolved, x), [x], error)
    windows = [batch_of(*ends, None) for ends in pairwise([0, *accumulate(cut)])]
    count = 2 * sum(bool(batch.longer_spans) for batch in windows)
    assert calls == ({"causal_conv1d_fn": count} if library else {})
