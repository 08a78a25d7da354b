"""Collectives of a rank's graph, over the ranks that its batch names.

Each runs immediately, as `all_reduce(x, batch)`, or in parallel to other work:

    s = all_reduce.begin(x, batch)
    …
    s = s()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pcg.kernels.batch import ProgramBatch
from pcg.peft.weights import AdapterWeight
from pcg.ranks.group import PendingCollective, Ranks, RowsToAll
from pcg.ranks.step_parts import gathered_rows, placed_rows, rows_of_rank, shard_rows


@dataclass(frozen=True)
class Exchange:
    """A message to a group, the kind of its collective, and a function of the answers."""

    ranks: Ranks
    kind: str
    sent: Any
    finish: Callable[[Any], Any] = lambda came: came


class Collective:
    """A collective that runs, or is begun."""

    def __init__(self, exchange: Callable[..., Any]) -> None:
        """Wrap a function that returns an exchange, or the result without an exchange."""
        self._exchange = exchange
        self.__doc__ = exchange.__doc__

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        exchange = self._exchange(*arguments, **options)
        if not isinstance(exchange, Exchange):
            return exchange
        finish, came = exchange.finish, getattr(exchange.ranks, exchange.kind)(exchange.sent)
        del exchange  # and what was sent
        return finish(came)

    def begin(self, *arguments: Any, **options: Any) -> PendingCollective:
        """Begin it; the returned function waits for it, and returns the result."""
        exchange = self._exchange(*arguments, **options)
        if not isinstance(exchange, Exchange):
            return lambda: exchange
        finish, wait = exchange.finish, exchange.ranks.begin(exchange.kind, exchange.sent)
        return lambda: finish(wait())


@Collective
def all_reduce(x: Tensor | None, batch: ProgramBatch) -> Exchange | None:
    """The sum over the ranks; None, as below, of a site without adapters."""
    return None if x is None else Exchange(batch.ranks, "all_reduce", x)


@Collective
def reduce_scatter(x: Tensor, batch: ProgramBatch) -> Exchange:
    """The rank's part of the tokens of the sum over the ranks."""
    size = batch.ranks.size
    parts = [rows_of_rank(x, rank, size).contiguous() for rank in range(size)]
    return Exchange(batch.ranks, "reduce_scatter", parts)


@Collective
def all_gather(
    x: Any, dim: int, batch: ProgramBatch, tokens: bool = False, logits: bool = False
) -> Exchange | None:
    """The ranks' parts of a tensor, or of an adapter's weight, joined along a dim.

    If only the first rank wants logits, the others keep their part.
    """
    if x is None:
        return None
    if logits and batch.logits_on_first:
        return Exchange(batch.ranks, "gather", x, lambda came: torch.cat(came, dim) if came else x)

    tensor, scale = _taken_apart(x)

    def joined(parts: list[Tensor]) -> Any:
        whole = gathered_rows(parts, batch.tokens) if tokens else torch.cat(parts, dim)
        return whole if scale is None else AdapterWeight(whole, scale)

    return Exchange(batch.ranks, "all_gather", tensor.contiguous(), joined)


def _taken_apart(x: Any) -> tuple[Tensor, float | None]:
    return (x, None) if isinstance(x, Tensor) else (x.weight, x.scale)


@Collective
def all_reduces(xs: Sequence[Tensor | None], batch: ProgramBatch) -> Exchange | list[None]:
    """The sums over the ranks, in one message."""
    present = {i: x for i, x in enumerate(xs) if x is not None}
    sums: list[Any] = [None] * len(xs)
    if not present:
        return sums
    shapes = {i: x.shape for i, x in present.items()}

    def apart(total: Tensor) -> list[Tensor | None]:
        parts = total.split([shape.numel() for shape in shapes.values()])
        for (i, shape), part in zip(shapes.items(), parts, strict=True):
            sums[i] = part.view(shape).clone()
        return sums

    return Exchange(batch.ranks, "all_reduce", _joined(present.values()), apart)


def _joined(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([x.reshape(-1) for x in tensors])


@Collective
def all_gathers(
    xs: Sequence[Any], dims: Sequence[int], batch: ProgramBatch
) -> Exchange | list[None]:
    """The ranks' parts of tensors, or of an adapter's weights, in one message; each is joined."""
    present = {i: _taken_apart(x) for i, x in enumerate(xs) if x is not None}
    wholes: list[Any] = [None] * len(xs)
    if not present:
        return wholes
    kinds = {i: (tensor.shape, scale) for i, (tensor, scale) in present.items()}

    def joined(came: list[Tensor]) -> list[Any]:
        sizes = [shape.numel() for shape, _ in kinds.values()]
        by_tensor = zip(*(message.split(sizes) for message in came), strict=True)
        for (i, (shape, scale)), parts in zip(kinds.items(), by_tensor, strict=True):
            whole = torch.cat([part.view(shape) for part in parts], dims[i])
            wholes[i] = whole if scale is None else AdapterWeight(whole, scale)
        return wholes

    sent = _joined(tensor for tensor, _ in present.values())
    return Exchange(batch.ranks, "all_gather", sent, joined)


@Collective
def dispatched(x: Tensor, indices: Tensor, experts: int, batch: ProgramBatch) -> Exchange:
    """All tokens' rows, where the rank's experts are chosen; zeros elsewhere."""
    routes = _routes(indices, x.dim() == 3, experts, batch.ranks)
    shape = len(indices), *x.shape[1:]

    def placed(came: Tensor) -> Tensor:
        whole = came.new_zeros(len(routes.chosen), *came.shape[1:])
        whole[routes.here] = came
        return whole.view(shape)

    rows = RowsToAll(routes.rows_of(x)[routes.own], routes.own_counts, routes.here_counts)
    return Exchange(batch.ranks, "all_to_all", rows, placed)


@Collective
def collected(x: Tensor, indices: Tensor, experts: int, batch: ProgramBatch) -> Exchange:
    """The rank's tokens' rows: sums of the rows of the ranks with their experts."""
    routes = _routes(indices, x.dim() == 3, experts, batch.ranks)
    tokens = shard_rows(len(indices), batch.ranks.size)
    shape = tokens, *x.shape[1:]

    def summed(came: Tensor) -> Tensor:
        part = came.new_zeros(len(routes.chosen) // len(indices) * tokens, *came.shape[1:])
        pieces = zip(
            routes.own.split(routes.own_counts), came.split(routes.own_counts), strict=True
        )
        for places, piece in pieces:  # in the order of the ranks, as each row is there once
            part[places] += piece
        return part.view(shape)

    rows = RowsToAll(routes.rows_of(x)[routes.here], routes.here_counts, routes.own_counts)
    return Exchange(batch.ranks, "all_to_all", rows, summed)


@dataclass(frozen=True)
class _Routes:
    """The rows that ranks exchange: of tokens [T], or of their choices [T k].

    Attributes:
        chosen: True if a row is that of a rank's expert, [rows, n].
        own: rows of this rank's tokens that ranks have, a rank after another, from its first token.
        here: rows of all tokens that are those of this rank's experts.
        own_counts: the number of `own` for each rank.
        here_counts: the number of `here` of each rank's tokens.
    """

    chosen: Tensor
    own: Tensor
    here: Tensor
    own_counts: list[int]
    here_counts: list[int]

    def rows_of(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1) if x.dim() == 3 else x


def _routes(indices: Tensor, are_choices: bool, experts: int, ranks: Ranks) -> _Routes:
    """Return the routes of rows; they are kept with the indices, which nobody writes."""
    kept: dict[bool, _Routes] = indices.__dict__.setdefault("pcg_routes", {})
    if are_choices not in kept:
        owners = indices // experts
        by_rank = torch.arange(ranks.size, device=indices.device)
        chosen = owners.unsqueeze(-1) == by_rank
        chosen = chosen.flatten(0, 1) if are_choices else chosen.any(1)
        count = len(chosen) // len(indices) * shard_rows(len(indices), ranks.size)
        here = chosen[:, ranks.rank]
        parts = torch.nn.functional.pad(here, (0, ranks.size * count - len(here)))
        rows_of_rank = chosen[ranks.rank * count : (ranks.rank + 1) * count]
        kept[are_choices] = _Routes(
            chosen,
            rows_of_rank.t().nonzero()[:, 1],
            here.nonzero()[:, 0],
            rows_of_rank.sum(0).tolist(),
            parts.view(ranks.size, count).sum(1).tolist(),
        )
    return kept[are_choices]


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
    start = batch.ranks.rank * x.shape[dim]
    whole.narrow(dim, start, x.shape[dim]).copy_(x)
    return whole


def own_part(
    x: Any, dim: int, batch: ProgramBatch, tokens: bool = False, kept: bool = False
) -> Any:
    """The rank's part of a dim of a tensor, or of an adapter's weight, as a view.

    With `kept` it is a copy, as a view would keep the whole; a part of the tokens always is.
    """
    if x is None:
        return None
    if not isinstance(x, Tensor):
        return AdapterWeight(own_part(x.weight, dim, batch, tokens, kept), x.scale)
    if tokens:
        return rows_of_rank(x, batch.ranks.rank, batch.ranks.size).clone()
    size = x.shape[dim] // batch.ranks.size
    part = x.narrow(dim, batch.ranks.rank * size, size)
    return part.clone() if kept else part
