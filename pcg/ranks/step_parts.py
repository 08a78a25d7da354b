"""The parts of a step that ranks take: sequences, tokens of every sequence, or rows of all tokens.

Data parallelism: each replica takes some sequences of a finetuning step, and gradients are summed.

    loss = Σ_replicas Σ_t ce(t) / N        g = Σ_replicas g_replica        N: the step's targets

The base is frozen, so a step sums the adapter's gradients once, whatever its batches are: in a
message of 4 bytes a number, 168 MB for LoRA of rank 16 on all linears of Llama-3.1-8B. All replicas
know all sequences, so that a step is the same at any degree, and a job can continue at another
degree.

Context parallelism: the n ranks of a group have parts of the tokens of every sequence.

    chunk j of 2 n of a sequence of L tokens is tokens ⌊j L / 2 n⌋ to ⌊(j + 1) L / 2 n⌋
    rank i has chunks i and 2 n - 1 - i

A token attends to those before it, so that later chunks are more work: dealt in this zigzag, each
rank has as much of it as any other (Llama 3, arXiv:2407.21783, §3.3.2). Of a sequence of fewer
tokens than chunks other ranks have the chunks than of the one before it. All but attention treats
each token by itself. Attention has the queries of a rank's own tokens, and gathers the keys and
values of all ranks' (P rows of each, the most that a rank has; shorter parts are padded):

    forward     K, V = all-gather(k, v)
    backward    K, V = all-gather(k, v) again;  dk, dv = reduce-scatter(dK, dV)

Of a step that serves, the tokens of each prompt are cut likewise. Each rank then writes all keys
and values into its own KV cache, so that steps of few tokens, as those that decode, run on all of
them without a message.

Sequence parallelism: shards of a step's T tokens in their order.

    P = ceil(T / n) rows on every rank; rank i has tokens i P to (i + 1) P of T

So the same graph serves all ranks. Where n does not divide T, the last rows are padding: a few of
one rank, and all P of some where T is less than n. They are zeros in shards of whole tensors, and
are dropped where shards are gathered, so that their gradient is zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from pcg.ranks.group import Ranks

LEAST_TOKENS = 128
"""The fewest tokens of prompts in a step for which ranks share it."""


class Piece(NamedTuple):
    """Some tokens of a sequence, from `start` to before `stop`."""

    sequence: int
    start: int
    stop: int


def dealt(lengths: Sequence[int], degree: int) -> list[list[Piece]]:
    """Return the pieces of each rank, in the order of sequences and tokens; none is empty."""
    chunks = 2 * degree
    parts: list[list[Piece]] = [[] for _ in range(degree)]
    for number, length in enumerate(lengths):
        bounds = [j * length // chunks for j in range(chunks + 1)]
        turn = number if length < chunks else 0
        for rank, part in enumerate(parts):
            first = (rank + turn) % degree
            last = chunks - 1 - first
            places = [(bounds[j], bounds[j + 1]) for j in (first, last)]
            if first + 1 == last:  # one behind the other
                places = [(bounds[first], bounds[last + 1])]
            part += [Piece(number, *place) for place in places if place[0] < place[1]]
    return parts


def most_rows(lengths: Sequence[int], degree: int) -> int:
    """Return P: the most tokens that a rank has of some sequences, at least 1."""
    return max(1, *(_count(part) for part in dealt(lengths, degree)))


def _count(part: Sequence[Piece]) -> int:
    return sum(piece.stop - piece.start for piece in part)


class TokenParts:
    """The parts that the ranks of a group have of the tokens of a pass.

    A rank without tokens runs the first token of the pass, which another rank has: its results are
    not read, and add nothing to gradients.

    Attributes:
        ranks: the group.
        pieces: this rank's pieces.
        is_spare: True if this rank has no tokens.
        rows: P.
        places: row of each token of the pass among the ranks' rows, [T].
    """

    def __init__(self, lengths: Sequence[int], ranks: Ranks, device: torch.device) -> None:
        """Deal the tokens of sequences of these lengths; `device` is that of the exchange."""
        parts = dealt(lengths, ranks.size)
        self.ranks = ranks
        self.is_spare = not parts[ranks.rank]
        self.pieces = parts[ranks.rank] or [Piece(0, 0, 1)]
        self.rows = most_rows(lengths, ranks.size)
        counts = [_count(part) for part in parts]
        origins = [0, *accumulate(lengths)]
        order = [
            torch.arange(
                origins[piece.sequence] + piece.start, origins[piece.sequence] + piece.stop
            )
            for part in parts
            for piece in part
        ]
        held = torch.cat(order).split(counts)
        places = torch.empty(sum(lengths), dtype=torch.int64)
        for rank, tokens in enumerate(held):
            places[tokens] = torch.arange(len(tokens)) + rank * self.rows
        self.places = places.to(device)
        self._held = [tokens.to(device) for tokens in held]
        self._count = counts[ranks.rank]

    def gathered(self, *tensors: Tensor) -> list[Tensor]:
        """Return tensors of all tokens, [T, …], from those of this rank's, in a single message.

        They have the dtype of the first tensor.
        """
        widths = [tensor.shape[1:].numel() for tensor in tensors]
        sent = tensors[0].new_zeros(self.rows, sum(widths))
        for column, tensor in zip(sent.split(widths, 1), tensors, strict=True):
            column[: self._count] = tensor[: self._count].flatten(1)
        whole = sent.new_empty(len(self.places), sum(widths))
        for part, tokens in zip(self.ranks.all_gather(sent), self._held, strict=True):
            whole.index_copy_(0, tokens, part[: len(tokens)])
        columns = whole.split(widths, 1)
        return [
            x.unflatten(1, tensor.shape[1:]) for x, tensor in zip(columns, tensors, strict=True)
        ]


class TokenSums:
    """Sums over the ranks of tensors of all tokens, such as gradients of keys and values."""

    def __init__(self, parts: TokenParts, *like: Tensor) -> None:
        """Start with zeros for tensors of the sizes of `like`, which have this rank's tokens."""
        self._parts = parts
        self._like = like
        self._widths = [tensor.shape[1:].numel() for tensor in like]
        rows = parts.rows * parts.ranks.size
        self._rows = like[0].new_zeros(rows, sum(self._widths))

    def add(self, start: int, *tensors: Tensor) -> None:
        """Add tensors of consecutive tokens, from the token at `start` of the pass."""
        places = self._parts.places[start : start + tensors[0].shape[0]]
        for column, tensor in zip(self._rows.split(self._widths, 1), tensors, strict=True):
            column.index_add_(0, places, tensor.flatten(1).to(column.dtype))

    def scattered(self) -> list[Tensor]:
        """Return the sums over all ranks for this rank's tokens, in a single message."""
        ranks, rows = self._parts.ranks, self._parts.rows
        sums = ranks.reduce_scatter(list(self._rows.split(rows)))
        columns = sums.split(self._widths, 1)
        return [
            column[: len(like)].reshape(like.shape)
            for column, like in zip(columns, self._like, strict=True)
        ]


def shares(batches: Sequence[Sequence[int]], replicas: int) -> list[list[list[int]]]:
    """Divide the sequences of a step's batches over replicas, for about as many tokens each.

    A batch's sequences go, the longest first, to the replica that has the fewest of its tokens; of
    several, to the rank that has the fewest of the step. A part is no longer than a replica's part
    of the batch's tokens and its longest sequence together, and may be empty.

    Args:
        batches: the tokens of each sequence of each batch.
    Returns:
        For each replica the places of its sequences in each batch, ascending.
    """
    of_step = [0] * replicas
    parts: list[list[list[int]]] = [[] for _ in range(replicas)]
    for lengths in batches:
        of_batch = [0] * replicas
        by_replica: list[list[int]] = [[] for _ in range(replicas)]
        for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
            owner = min(range(replicas), key=lambda replica: (of_batch[replica], of_step[replica]))
            by_replica[owner].append(place)
            of_batch[owner] += lengths[place]
            of_step[owner] += lengths[place]
        for part, places in zip(parts, by_replica, strict=True):
            part.append(sorted(places))
    return parts


def sum_gradients(ranks: Ranks, parameters: Mapping[str, Tensor]) -> list[str]:
    """Add up the replicas' gradients in place, in a message; zeros replace missing gradients.

    Args:
        ranks: the replicas; a replica without sequences has no gradient.
        parameters: the trained tensors by name; all have a gradient afterwards.
    Returns:
        The names of those that no replica had a gradient of.
    """
    missing = torch.tensor([p.grad is None for p in parameters.values()], device=ranks.device)
    for parameter in parameters.values():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    if ranks.size > 1 and parameters:
        gradients = [p.grad for p in parameters.values() if p.grad is not None]
        dtype = torch.promote_types(torch.float32, gradients[0].dtype)
        flat = [tensor.reshape(-1).to(ranks.device, dtype) for tensor in (*gradients, missing)]
        total = ranks.all_reduce(torch.cat(flat))
        *sums, lacking = total.split([tensor.numel() for tensor in flat])
        for gradient, total in zip(gradients, sums, strict=True):
            gradient.copy_(total.view_as(gradient))
        missing = lacking == ranks.size
    return [name for name, lacks in zip(parameters, missing.tolist(), strict=True) if lacks]


def shard_rows(tokens: int, degree: int) -> int:
    """Return the number of rows of each rank's shard."""
    return -(-tokens // degree)


def rows_of_rank(x: Tensor, rank: int, degree: int) -> Tensor:
    """Return a rank's rows of x [T, …], a view without padding: [P, …]."""
    count = shard_rows(x.shape[0], degree)
    rows = x[rank * count : (rank + 1) * count]
    if rows.shape[0] == count:
        return rows
    padded = x.new_zeros(count, *x.shape[1:])
    padded[: rows.shape[0]] = rows
    return padded


def gathered_rows(parts: Sequence[Tensor], tokens: int) -> Tensor:
    """Join the ranks' shards without padding: [T, …]."""
    count = parts[0].shape[0]
    return torch.cat([part[: max(0, tokens - i * count)] for i, part in enumerate(parts)])


def placed_rows(part: Tensor, rank: int, tokens: int) -> Tensor:
    """Return a rank's shard among zeros: [T, …]."""
    whole = part.new_zeros(tokens, *part.shape[1:])
    rows = whole[rank * part.shape[0] : (rank + 1) * part.shape[0]]
    rows.copy_(part[: rows.shape[0]])
    return whole


def chosen_rows(part: Tensor, rows: Tensor, rank: int) -> Tensor:
    """Return tokens `rows` of the whole in a rank's shard [P, …], and zeros for others."""
    places = rows - rank * part.shape[0]
    is_own = (places >= 0) & (places < part.shape[0])
    chosen = part[places.clamp(0, part.shape[0] - 1)]
    chosen[~is_own] = 0
    return chosen
