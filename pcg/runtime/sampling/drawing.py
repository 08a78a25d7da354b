"""Drawing: one token of each row, at a number u of its cumulative distribution."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from pcg.kernels.token_limits import TokenLimits
from pcg.runtime.sampling.filters import filtered, limits_of
from pcg.runtime.sampling.sampling_params import SamplingParams

DrawKernel: TypeAlias = Callable[[Tensor, TokenLimits, Tensor], tuple[Tensor, Tensor]]
"""Draws tokens from logits, limits and numbers u, as `Drawing.draw` does."""
KeepKernel: TypeAlias = Callable[[Tensor, TokenLimits], Tensor]
"""Filters logits by limits, as `Drawing.keep` does."""


@dataclass(frozen=True)
class Drawing:
    """The operators that choose tokens.

    Attributes:
        greedy: returns each row's most likely token, [R, V] to [R]; of equal ones the first.
        draw: returns the tokens [R] drawn from logits [R, V] by each row's temperature, top-k,
            top-p and min-p, at its number u [R], and True for each that could be drawn, [R].
        keep: returns the logits [R, V] over each row's temperature, and -inf for the tokens that
            `draw` never draws.
    """

    greedy: Callable[[Tensor], Tensor]
    draw: Callable[[Tensor, Sequence[SamplingParams], Tensor], tuple[Tensor, Tensor]]
    keep: Callable[[Tensor, Sequence[SamplingParams]], Tensor] = filtered

    @classmethod
    def by_kernels(
        cls, greedy: Callable[[Tensor], Tensor], draw: DrawKernel, keep: KeepKernel
    ) -> Drawing:
        """Return the kernels of a program, which find the tokens that may be drawn themselves."""

        def drawn(
            logits: Tensor, params: Sequence[SamplingParams], uniform: Tensor
        ) -> tuple[Tensor, Tensor]:
            return draw(logits, limits_of(params, logits), uniform)

        def kept(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
            return keep(logits, limits_of(params, logits))

        return cls(greedy, drawn, kept)


def _draw(
    logits: Tensor, params: Sequence[SamplingParams], uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw as `Drawing.draw` does, by PyTorch's operators."""
    # fp64, as in fp32 tokens below its rounding would be lost in a large vocabulary.
    cumulative = filtered(logits, params).softmax(dim=-1).double().cumsum(dim=-1)
    total = cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, uniform[:, None] * total, right=True).squeeze(1)
    # Rounding can put the point on the total itself, past the last token with a probability.
    are_there = drawn < logits.shape[-1]
    if not drawn.is_cpu or not are_there.all():  # a GPU is not waited for
        drawn = torch.where(are_there, drawn, logits.argmax(dim=-1))
    return drawn, total.isfinite().squeeze(1)


PYTORCH = Drawing(partial(torch.argmax, dim=-1), _draw)
"""PyTorch's operators, on any device."""
