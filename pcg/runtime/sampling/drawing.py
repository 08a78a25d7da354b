"""Drawing: one token of each row, at a number u of its cumulative distribution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor


@dataclass(frozen=True)
class Drawing:
    """A program's kernels that choose tokens.

    Attributes:
        greedy: returns each row's most likely token, [R, V] to [R]; of equal ones the first.
        draw: returns the tokens [R] drawn from logits [R, V] at temperatures [R] and numbers u [R],
            and True for each that could be drawn, [R].
    """

    greedy: Callable[[Tensor], Tensor]
    draw: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def _invert(logits: Tensor, temperatures: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Draw as `Drawing.draw` does, by PyTorch's operators."""
    # fp64, as in fp32 tokens below its rounding would be lost in a large vocabulary.
    cumulative = (logits / temperatures[:, None]).softmax(dim=-1).double().cumsum(dim=-1)
    total = cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, uniform[:, None] * total, right=True).squeeze(1)
    # Rounding can put the point on the total itself, past the last token with a probability.
    drawn = torch.where(drawn < logits.shape[-1], drawn, logits.argmax(dim=-1))
    return drawn, total.isfinite().squeeze(1)


PYTORCH = Drawing(partial(torch.argmax, dim=-1), _invert)
"""PyTorch's operators, on any device."""
