"""Cells of prompts: tokens beside the prompt's own whose log-probabilities a request asks for.

A place of a prompt has the tokens that the request names for it, and some that are drawn there from

    softmax(l / temperature)         l: the raw logits, in fp64; the likeliest token at 0

with replacement, at uniform numbers that the request's seed and the place decide. So a place that
is computed again has the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pcg.kernels.devices import uploaded_list
from pcg.runtime.sampling.sampling_params import SamplingParams

_NONE = -1


class PromptCells:
    """The cells of rows that are places of prompts.

    Attributes:
        counts: the number of cells of each row; empty if none has any.
    """

    def __init__(self, parts: Sequence[tuple[SamplingParams, range]]) -> None:
        """Take the rows.

        Args:
            parts: parameters of requests, and the places of their rows in turn, from 1 on.
        """
        self._rows = [(params, place) for params, places in parts for place in places]
        counts = [
            len(_targets(params, place)) + params.prompt_draws for params, place in self._rows
        ]
        self._width = max(counts, default=0)
        self.counts = counts if self._width else []

    def of(self, logits: Tensor, start: int) -> Tensor | None:
        """Return the tokens of some rows' cells, [R, m], below 0 for none; None if none has any.

        Args:
            logits: those of the rows from `start` on, [R, V].
        """
        if not self._width:
            return None
        rows = self._rows[start : start + len(logits)]
        listed = []
        for params, place in rows:
            targets = _targets(params, place)
            listed += [*targets, *[_NONE] * (self._width - len(targets))]
        cells = uploaded_list(listed, torch.int64, logits.device).view(len(rows), self._width)
        for row, (params, place) in enumerate(rows):
            if params.prompt_draws:
                first = len(_targets(params, place))
                drawn = _draw(logits[row], params, place)
                cells[row, first : first + params.prompt_draws] = drawn
        return cells


def _targets(params: SamplingParams, place: int) -> tuple[int, ...]:
    return params.prompt_targets[place - 1] if params.prompt_targets else ()


def _draw(logits: Tensor, params: SamplingParams, place: int) -> Tensor:
    """Return tokens that are drawn by logits [V]."""
    if params.greedy:
        return logits.argmax().expand(params.prompt_draws)
    key = None if params.seed is None else [params.seed, place]
    uniform = np.random.default_rng(key).random(params.prompt_draws)
    exact = logits.to(torch.float64)  # in which no temperature is 0
    shares = ((exact - exact.max()) / params.temperature).softmax(dim=-1).cumsum(dim=-1)
    at = torch.from_numpy(uniform).to(logits.device) * shares[-1]
    return torch.searchsorted(shares, at, right=True).clamp(max=len(logits) - 1)
