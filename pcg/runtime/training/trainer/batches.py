"""Batches of a trainer: data that goes through the model together, and its loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pcg.runtime.training.losses.columns import Columns
from pcg.runtime.training.losses.loss import Loss
from pcg.runtime.training.losses.token_losses import Options
from pcg.runtime.training.trainer.datum import CheckedDatum, columns_of


@dataclass(frozen=True)
class Score:
    """A loss with its options."""

    loss: Loss
    options: Options


@dataclass(frozen=True)
class ScoredBatch:
    """Data that goes through the model together.

    Attributes:
        score: the loss.
        columns: what the loss reads of each token.
    """

    data: Sequence[CheckedDatum]
    score: Score
    columns: Columns


def cut(
    data: Sequence[CheckedDatum],
    score: Score,
    batch_size: int,
    max_tokens: int | None,
    device: torch.device,
) -> list[ScoredBatch]:
    """Cut data into batches, in its order; data of one term of the loss stay together.

    Args:
        batch_size: the most data of a batch, unless one term has more.
        max_tokens: the most tokens of a batch, likewise; None for any number.
        device: where the columns are needed.
    """
    together = score.loss.together
    found: list[list[CheckedDatum]] = []
    tokens = 0
    for begin in range(0, len(data), together):
        group = data[begin : begin + together]
        length = sum(len(one.ids) for one in group)
        tokens += length
        is_full = bool(found) and (
            len(found[-1]) + together > batch_size
            or (max_tokens is not None and tokens > max_tokens)
        )
        if is_full or not found:
            found.append([])
            tokens = length
        found[-1] += group
    return [ScoredBatch(one, score, columns_of(one, device)) for one in found]
