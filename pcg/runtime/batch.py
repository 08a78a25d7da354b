"""A token-flat batch: the tokens of one step, of whatever sequence, one behind the other."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pcg.parallel.ranks import ALONE, Ranks
from pcg.runtime.kv_cache import KvCache

ANY_TOKEN = 0
"""What stands for the id of a virtual token; every vocabulary has it."""


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's tokens in a batch.

    Attributes:
        start: index of its first token in the batch.
        length: tokens in the batch.
        context: tokens before them, in the KV cache.
        row: first row of the sequence in the KV cache; 0 without one.
        virtual: how many of its tokens, the first, are virtual: those of its adapter's prompt, and
            their ids mean nothing.
    """

    start: int
    length: int
    context: int = 0
    row: int = 0
    virtual: int = 0


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Consecutive sequences of one new token each whose cache rows lie at equal distances.

    Attributes:
        start: index of the first one's span.
        count: sequences.
        row: first row that the first one attends to.
        stride: rows from one sequence's first to the next one's.
        longest: rows that the longest attends to.
        mask: [count, 1, 1, longest], added to the logits; None where all are equally long.
    """

    start: int
    count: int
    row: int
    stride: int
    longest: int
    mask: Tensor | None


class Batch:
    """Tokens, positions and spans of one step; what emitted attention asks of a batch.

    Attributes:
        input_ids: [T], int64.
        positions: of each token in its sequence, [T], int64.
        spans: cover all tokens, in order.
        layer: the layer that runs; the runner sets it.
        ranks: that run it, each on what it holds; the runner sets them.
        uniform_length: the spans' length where all are whole sequences of one length, else 0.
        virtual_rows: indices of the virtual tokens, [v]; None where there are none.
        virtual_places: which token of its prompt each of them is, [v]; None likewise.
        dropout_seed: of the batch's random numbers; None where nothing is dropped.
    """

    def __init__(
        self, input_ids: Tensor, spans: Sequence[Span], cache: KvCache | None = None
    ) -> None:
        self.input_ids = input_ids
        self.spans = tuple(spans)
        self.layer = 0
        self.ranks: Ranks = ALONE
        self.dropout_seed: int | None = None
        self._cache = cache
        self._groups: dict[int, list[DecodeGroup]] = {}
        positions = [s.context + i for s in self.spans for i in range(s.length)]
        self.positions = torch.tensor(positions, device=input_ids.device)
        if cache is not None:
            rows = [s.row + s.context + i for s in self.spans for i in range(s.length)]
            self._rows = torch.tensor(rows, device=input_ids.device)
        self.virtual_rows: Tensor | None = None
        self.virtual_places: Tensor | None = None
        if any(span.virtual for span in self.spans):
            found = [(s.start + i, i) for s in self.spans for i in range(s.virtual)]
            self.virtual_rows, self.virtual_places = torch.tensor(
                list(zip(*found, strict=True)), device=input_ids.device
            )
        lengths = {span.length for span in self.spans}
        whole = not any(span.context for span in self.spans)
        self.uniform_length = lengths.pop() if len(lengths) == 1 and whole else 0

    def generator(self, key: int) -> torch.Generator | None:
        """What a random operator of the layer draws from, the same each time it asks.

        Args:
            key: of the operator in its layer.
        """
        if self.dropout_seed is None:
            return None
        seed = mixed_seed(self.dropout_seed, self.layer, key)
        return torch.Generator(self.input_ids.device).manual_seed(seed)

    @property
    def last_tokens(self) -> Tensor:
        """Index of each span's last token, [spans]."""
        ends = [span.start + span.length - 1 for span in self.spans]
        return torch.tensor(ends, device=self.input_ids.device)

    def decode_groups(self, window: int) -> list[DecodeGroup]:
        """The spans, all of one token, in groups that attention can take in one call each.

        A group's longest sequence may be at most half as long again as its mean, so that little is
        read in vain.

        Args:
            window: rows that a token attends to at most; 0 for all.
        """
        if window not in self._groups:
            runs = [self._seen(span, window) for span in self.spans]
            self._groups[window] = [self._group(runs, *bounds) for bounds in self._cuts(runs)]
        return self._groups[window]

    @staticmethod
    def _seen(span: Span, window: int) -> tuple[int, int]:
        """First row and number of rows that a span's token attends to."""
        length = span.context + 1
        seen = min(length, window) if window else length
        return span.row + length - seen, seen

    def _cuts(self, runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Start and end of each group."""
        assert self._cache is not None
        cuts: list[tuple[int, int]] = []
        start, total, longest = 0, 0, 0
        for i, (row, seen) in enumerate(runs):
            stride = runs[start + 1][0] - runs[start][0] if i > start + 1 else row - runs[start][0]
            longest, total = max(longest, seen), total + seen
            joins = i == start or (
                stride > 0
                and row - runs[i - 1][0] == stride
                and 2 * longest * (i - start + 1) <= 3 * total
                and longest <= stride
                and row + longest <= self._cache.rows
            )
            if not joins:
                cuts.append((start, i))
                start, total, longest = i, seen, seen
        return [*cuts, (start, len(runs))]

    def _group(self, runs: Sequence[tuple[int, int]], start: int, end: int) -> DecodeGroup:
        lengths = [seen for _, seen in runs[start:end]]
        longest = max(lengths)
        stride = runs[start + 1][0] - runs[start][0] if end - start > 1 else 0
        mask = None
        if min(lengths) < longest:
            device = self.input_ids.device
            hidden = (
                torch.arange(longest, device=device)
                >= torch.tensor(lengths, device=device)[:, None]
            )
            mask = torch.zeros(hidden.shape, dtype=self._cache_dtype, device=device)
            mask = mask.masked_fill_(hidden, float("-inf"))[:, None, None, :]
        return DecodeGroup(start, end - start, runs[start][0], stride, longest, mask)

    @property
    def _cache_dtype(self) -> torch.dtype:
        assert self._cache is not None
        return self._cache.keys[0].dtype

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
        """Write this layer's keys and values of the tokens; returns all rows, or None uncached."""
        if self._cache is None:
            return None
        keys, values = self._cache.keys[self.layer], self._cache.values[self.layer]
        keys.index_copy_(1, self._rows, k.transpose(0, 1))
        values.index_copy_(1, self._rows, v.transpose(0, 1))
        return keys, values


def whole_sequences(
    sequences: Sequence[Sequence[int]], device: torch.device, virtual: Sequence[int] = ()
) -> Batch:
    """A batch of whole sequences without a KV cache, for logits and finetuning.

    Args:
        sequences: token ids.
        device: of the batch.
        virtual: virtual tokens before each sequence; none by default.
    """
    spans: list[Span] = []
    ids: list[int] = []
    for sequence, count in zip(sequences, virtual or (0,) * len(sequences), strict=True):
        spans.append(Span(len(ids), count + len(sequence), virtual=count))
        ids += [ANY_TOKEN] * count
        ids += sequence
    return Batch(torch.tensor(ids, dtype=torch.long, device=device), spans)


def mixed_seed(*numbers: int) -> int:
    """A seed that tells any two sequences of numbers apart, the same on every platform."""
    digest = hashlib.sha256(":".join(map(str, numbers)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
