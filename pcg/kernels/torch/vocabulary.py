"""The embedding and the loss over the vocabulary, whole or a rank's part of it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pcg.kernels.batch import ProgramBatch
from pcg.kernels.torch.norms import widened


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """-log softmax(logits)[target] of each token in fp32, 0 where the target is negative."""
    targets = targets.masked_fill(targets < 0, -100)
    return F.cross_entropy(widened(logits), targets, ignore_index=-100, reduction="none")


def cross_entropy_backward(dloss: Tensor, logits: Tensor, targets: Tensor) -> Tensor:
    """dloss · (softmax(logits) - onehot(target)), in the dtype of the logits."""
    dlogits = torch.softmax(widened(logits), -1)
    rows = torch.arange(targets.shape[0], device=targets.device)
    dlogits[rows, targets.clamp(min=0)] -= 1
    return dlogits.mul_((dloss * (targets >= 0)).unsqueeze(-1)).to(logits.dtype)


def embedding_part(ids: Tensor, table: Tensor, batch: ProgramBatch) -> Tensor:
    """Rows of the rank's part of a table; zeros for ids of other ranks."""
    own, is_own = _own_places(ids, table.shape[0], batch)
    return F.embedding(own, table).masked_fill_(~is_own.unsqueeze(-1), 0)


def cross_entropy_part(logits: Tensor, targets: Tensor, batch: ProgramBatch) -> Tensor:
    """The loss of each token in fp32, from the rank's part of the logits; 0 without a target."""
    wide = widened(logits)
    own, is_own = _own_places(targets, logits.shape[-1], batch)
    picked = wide.gather(-1, own.unsqueeze(-1)).squeeze(-1).masked_fill(~is_own, 0)
    picked = batch.ranks.all_reduce(picked)
    return (_log_sum_exp(wide, batch) - picked).masked_fill(targets < 0, 0)


def cross_entropy_part_backward(
    dloss: Tensor, logits: Tensor, targets: Tensor, batch: ProgramBatch
) -> Tensor:
    """dloss · (softmax(logits) - onehot(target)) of the rank's part."""
    wide = widened(logits)
    own, is_own = _own_places(targets, logits.shape[-1], batch)
    dlogits = torch.sub(wide, _log_sum_exp(wide, batch).unsqueeze(-1)).exp_()
    del wide  # before there is a copy in the dtype of the logits
    rows = torch.arange(targets.shape[0], device=targets.device)
    dlogits[rows, own] -= is_own.to(dlogits.dtype)
    return dlogits.mul_((dloss * (targets >= 0)).unsqueeze(-1)).to(logits.dtype)


def _own_places(ids: Tensor, size: int, batch: ProgramBatch) -> tuple[Tensor, Tensor]:
    """The place of each id in the rank's part of so many, and True where it is there."""
    own = ids - batch.ranks.rank * size
    return own.clamp(0, size - 1), (own >= 0) & (own < size)


def _log_sum_exp(logits: Tensor, batch: ProgramBatch) -> Tensor:
    """The log-sum-exp of each token's logits on all ranks, [T]."""
    return torch.stack(batch.ranks.all_gather(torch.logsumexp(logits, -1))).logsumexp(0)
