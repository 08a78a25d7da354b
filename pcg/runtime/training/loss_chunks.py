"""Loss chunks: target tokens whose loss is computed together, so that not all logits exist at once.

Where ranks hold parts of the tokens, each puts as many of its own rows into a chunk as any other,
so that no row moves between ranks: after a rank's last target its rows are padded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pcg.parallel.ranks.group import Ranks
from pcg.parallel.ranks.token_shards import shard_rows
from pcg.runtime.data.example import IGNORED


@dataclass(frozen=True)
class LossChunk:
    """Some tokens of a batch.

    Attributes:
        rows: indices of the tokens, [tokens], in the order of the ranks that hold them.
        targets: the target of each; negative for a padded row.
        own: this rank's rows of the chunk, in the part of the tokens that it holds.
        count: number of rows of that part, padded ones included; all tokens if ranks hold all.
    """

    rows: Tensor
    targets: Tensor
    own: Tensor
    count: int

    def of_whole(self, x: Tensor) -> Tensor:
        """Return the chunk of a tensor that each rank has for all tokens: [tokens, …]."""
        return x[self.rows]

    def of_own(self, x: Tensor) -> Tensor:
        """Return the chunk's part of this rank's tensor: [count, …]; padded rows are zeros."""
        if len(self.own) == self.count:
            return x[self.own]
        part = x.new_zeros(self.count, *x.shape[1:])
        part[: len(self.own)] = x[self.own]
        return part

    def put_own(self, part: Tensor, into: Tensor) -> None:
        """Write this rank's part of the chunk to its rows."""
        into[self.own] = part[: len(self.own)]


def loss_chunks(
    targets: Tensor, size: int, ranks: Ranks, is_sequence_parallel: bool
) -> Iterator[LossChunk]:
    """Yield all tokens with a target, in chunks.

    Args:
        targets: [T]; negative for none.
        size: the most tokens of a chunk, at least one of each rank.
        is_sequence_parallel: True if each rank holds a part of the tokens.
    """
    rows = torch.nonzero(targets >= 0).squeeze(-1)
    if not is_sequence_parallel:
        for chunk in rows.split(size):
            yield LossChunk(chunk, targets[chunk], chunk, len(chunk))
        return
    held = shard_rows(len(targets), ranks.size)
    own = [rows[rows // held == rank] for rank in range(ranks.size)]
    each = max(1, size // ranks.size)
    for start in range(0, max(map(len, own)), each):
        taken = [found[start : start + each] for found in own]
        tokens = pad_sequence(taken, batch_first=True)
        wanted = pad_sequence([targets[one] for one in taken], True, padding_value=IGNORED)
        mine = taken[ranks.rank] - ranks.rank * held
        yield LossChunk(tokens.flatten(), wanted.flatten(), mine, tokens.shape[1])
