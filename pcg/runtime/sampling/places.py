"""Places in a step's logits: many pairs of a row and a token, read and written by one operator."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pcg.kernels.uploads import uploaded

Found = Sequence[tuple[int, NDArray[np.int64]]]
"""Rows, and the tokens of each."""


def places(found: Found, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows [K] and the tokens [K] that index the logits [R, V]."""
    rows = np.repeat([row for row, _ in found], [len(tokens) for _, tokens in found])
    tokens = np.concatenate([tokens for _, tokens in found])
    return sent(rows, logits), sent(tokens, logits)


def sent(values: NDArray[np.generic], logits: Tensor) -> Tensor:
    """Copy an array to the device of the logits."""
    return uploaded(torch.from_numpy(values), logits.device)
