"""The limits within which rows draw their tokens, as kernels read them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class TokenLimits(NamedTuple):
    """Limits of S rows, fp32, [S] each.

    Attributes:
        temperatures: above 0.
        top_k: how many of the most likely tokens a row keeps; 0 for all.
        tails: 1 - p of top-p, the probability that the removed tokens may have; 0 for none.
        min_p: the least probability relative to the most likely token; 0 for none.
        is_cut: True if some row has top-k or top-p.
    """

    temperatures: Tensor
    top_k: Tensor
    tails: Tensor
    min_p: Tensor
    is_cut: bool
