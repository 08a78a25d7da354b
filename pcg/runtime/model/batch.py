"""A token-flat batch: the tokens of one step, of whatever sequence, one behind the other."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pcg.parallel.ranks.group import ALONE, Ranks
from pcg.runtime.memory.kv_cache import KvCache, KvGradients
from pcg.runtime.memory.pool import PageTable
from pcg.runtime.memory.uploads import uploaded
from pcg.runtime.model.decode_groups import DecodeGroup, Singles, decode_groups

DROPOUT_TOKENS = 64
"""Tokens of a sequence that dropout draws random numbers for at a time."""
ANY_TOKEN = 0
"""What stands for the id of a virtual token; every vocabulary has it."""


class Span(NamedTuple):
    """One sequence's tokens in a batch.

    Attributes:
        start: index of its first token in the batch.
        length: tokens in the batch.
        context: tokens before them, in the KV cache.
        table: pages of the sequence in the KV cache; None without one.
        virtual: how many of its tokens, the first, are virtual: those of its adapter's prompt, and
            their ids mean nothing.
        origin: in training, tokens of the pass before the sequence's first.
        number: in training, which sequence of the pass it is.
    """

    start: int
    length: int
    context: int = 0
    table: PageTable | None = None
    virtual: int = 0
    origin: int = 0
    number: int = 0


@dataclass(frozen=True, slots=True)
class DroppedPart:
    """Tokens that dropout draws random numbers for together.

    Random numbers are drawn for `DROPOUT_TOKENS` tokens of a sequence at a time, so that those of a
    token do not depend on how its sequence is cut into windows.

    Attributes:
        start: index of the first in the batch.
        count: how many are in the batch.
        skipped: tokens of the part that come before them.
        whole: tokens of the part.
        generator: of the part's random numbers.
    """

    start: int
    count: int
    skipped: int
    whole: int
    generator: torch.Generator


class Batch:
    """Tokens, positions and spans of one step; what emitted attention asks of a batch.

    Attributes:
        input_ids: [T], int64.
        positions: of each token in its sequence, [T], int64.
        spans: cover all tokens, in order.
        longer_spans: those of more than one token.
        layer: the layer that runs; the runner sets it.
        ranks: that run it, each on what it holds; the runner sets them.
        uniform_length: the spans' length where all are whole sequences of one length, else 0.
        virtual_rows: indices of the virtual tokens, [v]; None where there are none.
        virtual_places: which token of its prompt each of them is, [v]; None likewise.
        dropout_seed: of the batch's random numbers; None where nothing is dropped.
        chosen: which tokens the epilogue gets, where it gets some; None for all.
        keeps: whether it is trained on, so that attention hands out what backward reads.
        gradients: of the keys and values of the layer whose backward runs; None where whole
            sequences are trained on, without a cache.
        rows: of the cache, where the tokens' keys and values lie, [T]; None without a cache.
        known: what kernels make of the batch, kept for all layers.
    """

    def __init__(
        self,
        input_ids: Tensor,
        spans: Sequence[Span],
        cache: KvCache | None = None,
        *,
        keeps: bool = False,
    ) -> None:
        self.input_ids = input_ids
        self.spans = tuple(spans)
        self.layer = 0
        self.ranks: Ranks = ALONE
        self.dropout_seed: int | None = None
        self.chosen: Tensor | None = None
        self.keeps = keeps
        self.gradients: KvGradients | None = None
        self.rows: Tensor | None = None
        self.known: dict[object, Any] = {}
        self._cache = cache
        self._groups: dict[int, list[DecodeGroup]] = {}
        self._seen: dict[int, slice | Tensor] = {}
        # Each of these is one call, however many sequences there are: they change every step.
        columns: list[tuple[Any, ...]] = list(zip(*self.spans, strict=True)) or [()] * 7
        starts, lengths, contexts, tables, virtual, _, _ = columns
        self._tables: Sequence[PageTable] = tables
        self._starts, self._lengths, self._contexts = map(_column, (starts, lengths, contexts))
        places = np.arange(len(input_ids))
        positions = places + (self._contexts - self._starts).repeat(self._lengths)
        self.positions = self._on_device(positions)
        if cache is not None:
            self._first_rows = _column([table.run_row for table in tables])
            self.rows = self._on_device(self._cache_rows(positions))
        self.virtual_rows: Tensor | None = None
        self.virtual_places: Tensor | None = None
        if any(virtual):
            found = [(s.start + i, s.context + i) for s in self.spans for i in range(s.virtual)]
            numbers = torch.tensor(list(zip(*found, strict=True)))
            self.virtual_rows, self.virtual_places = uploaded(numbers, input_ids.device)
        whole = len(set(lengths)) == 1 and not any(contexts)
        self.uniform_length: int = lengths[0] if whole else 0
        self.longer_spans = [self.spans[i] for i in np.flatnonzero(self._lengths != 1).tolist()]

    @property
    def tokens(self) -> int:
        """T of what runs: all tokens, or those that the epilogue gets."""
        return len(self.input_ids if self.chosen is None else self.chosen)

    def _on_device(self, numbers: Numbers) -> Tensor:
        return uploaded(torch.from_numpy(numbers), self.input_ids.device)

    def _cache_rows(self, positions: Numbers) -> Numbers:
        """Where the tokens lie in the cache, [T]."""
        rows = positions + self._first_rows.repeat(self._lengths)
        for i in np.flatnonzero(self._first_rows < 0):
            span = self.spans[i]
            end = span.context + span.length
            rows[span.start : span.start + span.length] = _rows(span, span.context, end)
        return rows

    def dropped_parts(self, key: int) -> list[DroppedPart]:
        """What a random operator of the layer draws from, the same each time it asks.

        Args:
            key: of the operator in its layer.
        Returns:
            Parts that cover all tokens in order; none where nothing is dropped.
        """
        found: list[DroppedPart] = []
        if self.dropout_seed is None:
            return found
        for span in self.spans:
            done, end = span.context, span.context + span.length
            while done < end:
                part, skipped = divmod(done, DROPOUT_TOKENS)
                count = min(end - done, DROPOUT_TOKENS - skipped)
                seed = mixed_seed(self.dropout_seed, span.number, part, self.layer, key)
                generator = torch.Generator(self.input_ids.device).manual_seed(seed)
                start = span.start + done - span.context
                found.append(DroppedPart(start, count, skipped, DROPOUT_TOKENS, generator))
                done += count
        return found

    def last_tokens(self, places: Sequence[int]) -> Tensor:
        """Index of the last token of each of some spans, [places]."""
        chosen = _column(places)
        return self._on_device(self._starts[chosen] + self._lengths[chosen] - 1)

    def decode_groups(self, window: int) -> list[DecodeGroup]:
        """The spans of one token, in groups that attention can take in one call each.

        Args:
            window: rows that a token attends to at most; 0 for all.
        """
        if window not in self._groups:
            assert self._cache is not None
            chosen = np.flatnonzero(self._lengths == 1)
            singles = Singles(
                self._starts[chosen],
                self._first_rows[chosen],
                self._contexts[chosen] + 1,
                [self._tables[i] for i in chosen.tolist()],
            )
            dtype, device = self._cache.keys[0].dtype, self.input_ids.device
            self._groups[window] = decode_groups(singles, window, self._cache.rows, dtype, device)
        return self._groups[window]

    def seen(self, span: Span) -> slice | Tensor:
        """The rows of the cache that hold a sequence up to the end of its span."""
        found = self._seen.get(span.start)
        if found is None:
            rows = _rows(span, 0, span.context + span.length)
            if isinstance(rows, range):
                found = slice(rows.start, rows.stop)
            else:
                found = torch.tensor(rows, device=self.input_ids.device)
            self._seen[span.start] = found
        return found

    @property
    def cached(self) -> tuple[Tensor, Tensor] | None:
        """Keys and values of all rows, [K, rows, D], of this layer; None uncached."""
        if self._cache is None:
            return None
        return self._cache.keys[self.layer], self._cache.values[self.layer]

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
        """Write this layer's keys and values of the tokens; returns all rows, or None uncached."""
        if self.cached is None:
            return None
        keys, values = self.cached
        assert self.rows is not None
        keys.index_copy_(1, self.rows, k.transpose(0, 1))
        values.index_copy_(1, self.rows, v.transpose(0, 1))
        return keys, values


Numbers: TypeAlias = NDArray[np.int64]


def _column(numbers: Sequence[int]) -> Numbers:
    return np.array(numbers, dtype=np.int64)


def _table(span: Span) -> PageTable:
    assert span.table is not None
    return span.table


def _rows(span: Span, start: int, stop: int) -> range | list[int]:
    return _table(span).rows(start, stop)


def whole_sequences(
    sequences: Sequence[Sequence[int]],
    device: torch.device,
    virtual: Sequence[int] = (),
    *,
    keeps: bool = False,
) -> Batch:
    """A batch of whole sequences without a KV cache, for logits and finetuning.

    Args:
        sequences: token ids.
        device: of the batch.
        virtual: virtual tokens before each sequence; none by default.
        keeps: whether they are trained on.
    """
    spans: list[Span] = []
    ids: list[int] = []
    for sequence, count in zip(sequences, virtual or (0,) * len(sequences), strict=True):
        spans.append(Span(len(ids), count + len(sequence), virtual=count, number=len(spans)))
        ids += [ANY_TOKEN] * count
        ids += sequence
    return Batch(torch.tensor(ids, dtype=torch.long, device=device), spans, keeps=keeps)


def mixed_seed(*numbers: int) -> int:
    """A seed that tells any two sequences of numbers apart, the same on every platform."""
    digest = hashlib.sha256(":".join(map(str, numbers)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
