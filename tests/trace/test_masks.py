"""What an attention function of the user's own adds to its scores is proved or refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface

from pcg.errors import TraceError
from pcg.trace import trace
from tests.support import oracle
from tests.support.families import BY_NAME
from tests.support.parameters import mostly_slow

HIDDEN = -1e9
BAND = torch.ones(512, 512).tril(-100).bool()
STEP = torch.arange(512).ge(300).float()
NOISE = torch.randn(512, 512, generator=torch.Generator().manual_seed(0))

Scores = Callable[[Tensor, Tensor, Tensor, Any], Tensor]
"""Scores by themselves, the queries' and the keys' positions, and the number of tokens."""

WINDOWS: dict[str, tuple[int, Scores]] = {
    "causal": (0, lambda s, i, j, n: s),
    "a window beyond all but long sequences": (
        3000,
        lambda s, i, j, n: s.masked_fill(i - j >= 3000, HIDDEN),
    ),
    "a window in place": (30, lambda s, i, j, n: s.masked_fill_(i - j >= 30, HIDDEN)),
    "a window by division": (48, lambda s, i, j, n: s.masked_fill((i - j) / 8 >= 6, HIDDEN)),
    "a window by a factor": (31, lambda s, i, j, n: s.masked_fill(2 * (i - j) >= 61, HIDDEN)),
    "a window by a triangle": (
        17,
        lambda s, i, j, n: s.masked_fill(torch.ones(n, n).tril(-17) > 0, HIDDEN),
    ),
    "a window in a table": (100, lambda s, i, j, n: s.masked_fill(BAND[:n, :n], HIDDEN)),
    "chunks": (-32, lambda s, i, j, n: s.masked_fill(i // 32 != j // 32, HIDDEN)),
    "a bound that nothing reaches": (0, lambda s, i, j, n: s.clamp(min=-1e30)),
}
REFUSED: dict[str, tuple[str, Scores]] = {
    "chunks of two sizes": (
        "of chunks",
        lambda s, i, j, n: s.masked_fill(i // 32 != j // 16, HIDDEN),
    ),
    "all but the chunk before": (
        "of chunks",
        lambda s, i, j, n: s.masked_fill(i // 32 - j // 32 == 1, HIDDEN),
    ),
    "keys behind half of the query": (
        "factors",
        lambda s, i, j, n: s.masked_fill((2 * j < i) & (i > 700), HIDDEN),
    ),
    "a block of the length": (
        "floordiv",
        lambda s, i, j, n: s.masked_fill((j < n // 64 * 64) & (i != j), HIDDEN),
    ),
    "a distance from the end": (
        "neither causal",
        lambda s, i, j, n: s.masked_fill(i - j == n - 500, HIDDEN),
    ),
    "long sinks and a window of three numbers": (
        "may turn at",
        lambda s, i, j, n: s.masked_fill(((i - j) * 6 + 94 >= 18_094) & (j >= 70), HIDDEN),
    ),
    "a notch of three numbers": (
        "neither causal",
        lambda s, i, j, n: s.masked_fill((i - j) * 6 + 94 == 18_094, HIDDEN),
    ),
    "a notch of five numbers": (
        "combines 5 numbers",
        lambda s, i, j, n: s.masked_fill(((i - j) * 6 + 92) * 7 + 94 == 10_618, HIDDEN),
    ),
    "sinks and a window": (
        "neither causal",
        lambda s, i, j, n: s.masked_fill((i - j >= 260) & (j >= 4), HIDDEN),
    ),
    "a gap that comes again": (
        "aten.remainder",
        lambda s, i, j, n: s.masked_fill((i - j) % 100 == 99, HIDDEN),
    ),
    "every second key later": (
        "aten.remainder",
        lambda s, i, j, n: s.masked_fill((j % 2 == 0) & (i >= 240) & (i != j), HIDDEN),
    ),
    "a corner of both positions": (
        "neither causal",
        lambda s, i, j, n: s.masked_fill((i + j >= 150) & (j < 3), HIDDEN),
    ),
    "the last query": (
        "neither causal",
        lambda s, i, j, n: s.masked_fill((i == n - 1) & (j == 3) & (i != j), HIDDEN),
    ),
    "clamped ALiBi": (
        "not linear",
        lambda s, i, j, n: s + 0.1 * torch.clamp(j - i, min=-400),
    ),
    "a bias of far keys": (
        "not linear",
        lambda s, i, j, n: s + torch.where(i - j > 2000, 1.0, 0.0),
    ),
    "a bias of the diagonal": ("not linear", lambda s, i, j, n: s + torch.where(i == j, 0.5, 0.0)),
    "a bias in a table": ("not linear", lambda s, i, j, n: s + STEP[:n]),
    "a table of noise": ("no function of the distance", lambda s, i, j, n: s + NOISE[:n, :n]),
    "log n": (
        "aten.log",
        lambda s, i, j, n: s * (torch.log(i.float() + 1) / math.log(32)).clamp(min=1),
    ),
    "a scale by the length": (
        "sym_float of the length",
        lambda s, i, j, n: s * (1 + 0.01 * (n - 1)),
    ),
    "a square": ("two positions", lambda s, i, j, n: s - 1e-3 * ((i - j) * (i - j))),
    "capped scores": ("aten.tanh", lambda s, i, j, n: 5 * torch.tanh(s / 5)),
    "bounded scores": ("aten.clamp", lambda s, i, j, n: s.clamp(min=-50)),
    "bits of a position": (
        "__and__",
        lambda s, i, j, n: s.masked_fill(((i & 64) != 0) & (j == 2), HIDDEN),
    ),
    "the largest score": ("aten.max", lambda s, i, j, n: s - s.max()),
}


def traced_windows(scores_of: Scores) -> list[int]:
    """The windows of a model whose attention is a registered function; negative for chunks."""

    def attention(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        tokens, times = q.shape[2], module.num_key_value_groups
        i, j = torch.arange(tokens)[:, None], torch.arange(tokens)
        scores = q @ k.repeat_interleave(times, 1).transpose(2, 3) * scaling
        scores = scores_of(scores, i, j, tokens).masked_fill(j > i, HIDDEN)
        return (scores.softmax(-1) @ v.repeat_interleave(times, 1)).transpose(1, 2), None

    AttentionInterface.register("scored", attention)
    model = oracle.random_model(BY_NAME["llama3"].config(2)).eval()
    model.config._attn_implementation = "scored"
    nodes = trace(model).graph.nodes
    found = [dict(node.attributes) for node in nodes if node.op == "attention"]
    return [each["window"] or -each.get("chunk", 0) for each in found]  # type: ignore[operator]


@pytest.mark.parametrize("name", mostly_slow(WINDOWS, *list(WINDOWS)[2::2]))
def test_a_window_is_found_however_it_is_written(name: str) -> None:
    window, scores_of = WINDOWS[name]
    assert traced_windows(scores_of) == [window, window]


@pytest.mark.parametrize("name", mostly_slow(REFUSED, *list(REFUSED)[::4]))
def test_another_mask_is_refused_wherever_it_begins(name: str) -> None:
    reason, scores_of = REFUSED[name]
    with pytest.raises(TraceError, match=reason):
        traced_windows(scores_of)
