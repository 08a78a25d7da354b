"""Collectives of a rank's graph, over the ranks that its batch names.

Each runs at once, as `all_reduce(x, batch)`, or goes on while other work is done:

    s = all_reduce.begin(x, batch)
    …
    s = s()
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pcg.kernels.batch import ProgramBatch
from pcg.parallel.ranks.group import PendingCollective, Ranks
from pcg.parallel.ranks.token_shards import gathered_rows, placed_rows, rows_of_rank
from pcg.peft.weights import AdapterWeight


@dataclass(frozen=True)
class Exchange:
    """A collective's message, and the function that makes its result.

    Attributes:
        ranks: the group.
        kind: all_gather, all_reduce or reduce_scatter.
        sent: the message.
        made: makes the result of what came.
    """

    ranks: Ranks
    kind: str
    sent: Any
    made: Callable[[Any], Any] = lambda came: came


class Collective:
    """A collective that runs at once, or is begun.

    Args:
        exchange: returns the exchange, or the result itself where there is nothing to exchange.
    """

    def __init__(self, exchange: Callable[..., Any]) -> None:
        self._exchange = exchange
        self.__doc__ = exchange.__doc__

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """The result."""
        found = self._exchange(*arguments, **options)
        if not isinstance(found, Exchange):
            return found
        made, came = found.made, getattr(found.ranks, found.kind)(found.sent)
        del found  # and what was sent
        return made(came)

    def begin(self, *arguments: Any, **options: Any) -> PendingCollective:
        """Begin it; the function that it returns waits for it, and returns the result."""
        found = self._exchange(*arguments, **options)
        if not isinstance(found, Exchange):
            return lambda: found
        made, wait = found.made, found.ranks.begin(found.kind, found.sent)
        return lambda: made(wait())


@Collective
def all_reduce(x: Tensor | None, batch: ProgramBatch) -> Exchange | None:
    """The sum over the ranks; None of a site without adapters, here and below."""
    return None if x is None else Exchange(batch.ranks, "all_reduce", x)


@Collective
def reduce_scatter(x: Tensor, batch: ProgramBatch) -> Exchange:
    """The rank's part of the tokens of the sum over the ranks."""
    size = batch.ranks.size
    parts = [rows_of_rank(x, rank, size).contiguous() for rank in range(size)]
    return Exchange(batch.ranks, "reduce_scatter", parts)


@Collective
def all_gather(x: Any, dim: int, batch: ProgramBatch, tokens: bool = False) -> Exchange | None:
    """The ranks' parts of a tensor, or of one adapter's weight, joined along a dim."""
    if x is None:
        return None

    def joined(parts: list[Tensor]) -> Tensor:
        return gathered_rows(parts, batch.tokens) if tokens else torch.cat(parts, dim)

    if isinstance(x, Tensor):
        return Exchange(batch.ranks, "all_gather", x.contiguous(), joined)
    scale = x.scale
    sent = x.weight.contiguous()
    return Exchange(batch.ranks, "all_gather", sent, lambda p: AdapterWeight(joined(p), scale))


@Collective
def all_reduces(xs: Sequence[Tensor | None], batch: ProgramBatch) -> Exchange | list[None]:
    """The sums over the ranks, in one message."""
    there = [x for x in xs if x is not None]
    if not there:
        return [None] * len(xs)
    shapes = [None if x is None else x.shape for x in xs]
    sizes = [x.numel() for x in there]

    def apart(total: Tensor) -> list[Tensor | None]:
        parts = iter(total.split(sizes))
        return [None if shape is None else next(parts).view(shape).clone() for shape in shapes]

    flat = torch.cat([x.reshape(-1) for x in there])
    return Exchange(batch.ranks, "all_reduce", flat, apart)


@Collective
def all_gathers(
    xs: Sequence[Any], dims: Sequence[int], batch: ProgramBatch
) -> Exchange | list[None]:
    """The ranks' parts of tensors, or of one adapter's weights, in one message; each is joined."""
    tensors = [x if x is None or isinstance(x, Tensor) else x.weight for x in xs]
    there = [x for x in tensors if x is not None]
    if not there:
        return [None] * len(xs)
    shapes = [None if x is None else x.shape for x in tensors]
    scales = [None if x is None or isinstance(x, Tensor) else x.scale for x in xs]
    sizes = [x.numel() for x in there]

    def joined(came: list[Tensor]) -> list[Any]:
        parts = iter(zip(*(one.split(sizes) for one in came), strict=True))
        found: list[Any] = []
        for shape, scale, dim in zip(shapes, scales, dims, strict=True):
            if shape is None:
                found.append(None)
                continue
            whole = torch.cat([part.view(shape) for part in next(parts)], dim)
            found.append(whole if scale is None else AdapterWeight(whole, scale))
        return found

    flat = torch.cat([x.reshape(-1) for x in there])
    return Exchange(batch.ranks, "all_gather", flat, joined)


def placed_part(
    x: Tensor | None, dim: int, batch: ProgramBatch, tokens: bool = False
) -> Tensor | None:
    """The rank's part of a dim, with zeros for the others'."""
    if x is None:
        return None
    if tokens:
        return placed_rows(x, batch.ranks.rank, batch.tokens)
    shape = list(x.shape)
    shape[dim] *= batch.ranks.size
    whole = x.new_zeros(shape)
    own = batch.ranks.rank * x.shape[dim]
    whole.narrow(dim, own, x.shape[dim]).copy_(x)
    return whole


def own_part(
    x: Any, dim: int, batch: ProgramBatch, tokens: bool = False, kept: bool = False
) -> Any:
    """The rank's part of a dim of a tensor, or of one adapter's weight: a view, but if it is kept.

    A part that is kept is a copy, as a view would keep the whole; one of the tokens always is.
    """
    if x is None:
        return None
    if not isinstance(x, Tensor):
        return AdapterWeight(own_part(x.weight, dim, batch, tokens, kept), x.scale)
    if tokens:
        return rows_of_rank(x, batch.ranks.rank, batch.ranks.size).clone()
    size = x.shape[dim] // batch.ranks.size
    own = x.narrow(dim, batch.ranks.rank * size, size)
    return own.clone() if kept else own
