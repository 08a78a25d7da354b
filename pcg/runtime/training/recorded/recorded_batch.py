"""The tokens of recorded functions of training, which are on the device only."""

from __future__ import annotations

import torch
from torch import Tensor

from pcg.kernels.batch import DroppedTokens
from pcg.kernels.triton.attention.work import AttentionWork
from pcg.ranks.group import SINGLE_RANK
from pcg.runtime.memory.kv_cache import KvCache
from pcg.runtime.model.batch import Batch


class RecordedTokens(Batch):
    """So many tokens, in memory that stays; at first tokens of no sequence.

    Attributes:
        work: the lists of attention, by heads that share a KV head and whether they are those of
            the backward; none where there is no attention.
    """

    def __init__(self, size: int, cache: KvCache, device: torch.device) -> None:
        self.input_ids = torch.zeros(size, dtype=torch.int64, device=device)
        self.positions = torch.zeros_like(self.input_ids)
        self.rows: Tensor = torch.full_like(self.input_ids, -1)
        self._dropped = DroppedTokens(
            torch.zeros(2, dtype=torch.int64, device=device),
            self.positions,
            torch.zeros_like(self.input_ids),
        )
        self.work: dict[tuple[int, bool], AttentionWork] = {}
        self.known = {}
        self.layer = 0
        self.ranks = SINGLE_RANK
        self.dropout_seed = self.chosen = self.gradients = None
        self.virtual_rows = self.virtual_places = self.parts = self.rows_of_all = None
        self.keeps = True
        self._cache = cache

    def dropped_tokens(self) -> DroppedTokens:
        """Return what a device draws by; the key says whether anything is dropped."""
        return self._dropped

    def take_dropped(self, batch: Batch, rows: Tensor) -> None:
        """Have dropout drop what it drops of some tokens of a batch, [n], which come first here."""
        dropped = batch.dropped_tokens()
        if dropped is None:
            self._dropped.key.zero_()
            return
        self._dropped.key.copy_(dropped.key)
        self._dropped.positions[: len(rows)] = dropped.positions[rows]
        self._dropped.sequences[: len(rows)] = dropped.sequences[rows]

    def take(self, batch: Batch) -> None:
        """Take the tokens of a batch of as many tokens or fewer; the others are of no sequence."""
        count = len(batch.input_ids)
        assert batch.rows is not None
        self.input_ids[:count] = batch.input_ids
        self.positions[:count] = batch.positions
        self.rows[:count] = batch.rows
        self.rows[count:] = -1
        dropped = batch.dropped_tokens()
        if dropped is None:
            self._dropped.key.zero_()
        else:
            self._dropped.key.copy_(dropped.key)
            self._dropped.sequences[:count] = dropped.sequences
        for (group, backward), work in self.work.items():
            made = AttentionWork.build(
                batch.spans, group, self.rows.device, backward=backward, capacity=work.capacity
            )
            work.flat.copy_(made.flat)
