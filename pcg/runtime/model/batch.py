"""A token-flat batch: the tokens of one step, of all its sequences one after the other."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pcg.ir.operators.bypass import DROPOUT_TOKENS
from pcg.kernels.batch import (
    BlockTable,
    DecodeGroup,
    DroppedPart,
    DroppedTokens,
    KvGradients,
    ProgramBatch,
    Span,
)
from pcg.kernels.devices import uploaded, uploaded_list
from pcg.ranks.group import SINGLE_RANK, Ranks
from pcg.ranks.step_parts import Piece, TokenParts
from pcg.runtime.memory.kv_cache import KvCache
from pcg.runtime.model.decode_groups import Singles, decode_groups

ANY_TOKEN = 0
"""The id that stands for a virtual token; every vocabulary has it."""


class Batch(ProgramBatch):
    """Tokens, positions and spans of one step; see `ProgramBatch` for what programs read.

    Attributes:
        positions: position of each token in its sequence, [T], int64.
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
        self.ranks: Ranks = SINGLE_RANK
        self.parts: TokenParts | None = None
        self.dropout_seed: int | None = None
        self.chosen: Tensor | None = None
        self.logits_on_first = False
        self.keeps = keeps
        self.gradients: KvGradients | None = None
        self.rows: Tensor | None = None
        self.rows_of_all: Tensor | None = None
        self.known: dict[object, Any] = {}
        self._cache = cache
        self._groups: dict[int, list[DecodeGroup]] = {}
        self._seen: dict[int, slice | Tensor] = {}
        # One call for all sequences each, as they change every step.
        columns: list[tuple[Any, ...]] = list(zip(*self.spans, strict=True)) or [()] * 7
        starts, lengths, contexts, tables, virtual, _, _ = columns
        self._tables: Sequence[BlockTable] = tables
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
        self.uniform_length = lengths[0] if whole else 0
        self.longer_spans = [self.spans[i] for i in np.flatnonzero(self._lengths != 1).tolist()]

    @property
    def tokens(self) -> int:
        """Number of tokens that run: all, or those that the epilogue reads."""
        return len(self.input_ids if self.chosen is None else self.chosen)

    def _on_device(self, numbers: Numbers) -> Tensor:
        return uploaded(torch.from_numpy(numbers), self.input_ids.device)

    def _cache_rows(self, positions: Numbers) -> Numbers:
        rows = positions + self._first_rows.repeat(self._lengths)
        for i in np.flatnonzero(self._first_rows < 0):
            span = self.spans[i]
            end = span.context + span.length
            rows[span.start : span.start + span.length] = _rows(span, span.context, end)
        return rows

    def dropped_parts(self, key: int) -> list[DroppedPart]:
        """Return the parts of all tokens that a random operator draws for, by its key in the layer.

        There are none if nothing is dropped.
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

    def dropped_tokens(self) -> DroppedTokens | None:
        """Return what a device draws by for all tokens; None if nothing is dropped."""
        if self.dropout_seed is None:
            return None
        if "dropped" not in self.known:
            numbers = _column([span.number for span in self.spans]).repeat(self._lengths)
            key = uploaded_list([self.dropout_seed, 1], torch.int64, self.input_ids.device)
            places = self.positions, self._on_device(numbers)
            self.known["dropped"] = DroppedTokens(key, *places)
        found: DroppedTokens = self.known["dropped"]
        return found

    def last_tokens(self, places: Sequence[int]) -> Tensor:
        """Return the index of the last token of each of some spans, [places]."""
        chosen = _column(places)
        return self._on_device(self._starts[chosen] + self._lengths[chosen] - 1)

    def decode_groups(self, window: int) -> list[DecodeGroup]:
        """Return the spans of one token, in groups that attention takes in one call each.

        Args:
            window: the most rows that a token attends to; 0 for all.
        """
        if window not in self._groups:
            assert self._cache is not None
            chosen = np.flatnonzero(self._lengths == 1)
            tables = [self._tables[i] for i in chosen.tolist()]
            singles = Singles(
                self._starts[chosen],
                self._first_rows[chosen],
                _column([table.stop_row for table in tables]),
                self._contexts[chosen] + 1,
                tables,
            )
            dtype, device = self._cache.keys[0].dtype, self.input_ids.device
            self._groups[window] = decode_groups(singles, window, dtype, device)
        return self._groups[window]

    def seen(self, span: Span) -> slice | Tensor:
        """Return the rows of the cache that hold a sequence up to the end of its span."""
        found = self._seen.get(span.start)
        if found is None:
            rows = _rows(span, 0, span.context + span.length)
            if isinstance(rows, range):
                found = slice(rows.start, rows.stop)
            else:
                found = uploaded(torch.tensor(rows), self.input_ids.device)
            self._seen[span.start] = found
        return found

    @property
    def cached(self) -> tuple[Tensor, Tensor] | None:
        """Keys and values of this layer's rows, [K, rows, D]; None without a cache."""
        if self._cache is None:
            return None
        return self._cache.keys[self.layer], self._cache.values[self.layer]

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
        """Write this layer's keys and values of the tokens; returns all rows, or None uncached.

        Tokens that ranks share are written by all of them.
        """
        if self.cached is None:
            return None
        keys, values = self.cached
        rows = self.rows
        if self.parts is not None:
            k, v = self.parts.gathered(k, v)
            rows = self.rows_of_all
        assert rows is not None
        keys.index_copy_(1, rows, k.transpose(0, 1))
        values.index_copy_(1, rows, v.transpose(0, 1))
        return keys, values


Numbers: TypeAlias = NDArray[np.int64]


def _column(numbers: Sequence[int]) -> Numbers:
    return np.array(numbers, dtype=np.int64)


def _rows(span: Span, start: int, stop: int) -> range | list[int]:
    assert span.table is not None
    return span.table.rows(start, stop)


def whole_sequences(
    sequences: Sequence[Sequence[int]],
    device: torch.device,
    virtual: Sequence[int] = (),
    *,
    keeps: bool = False,
    cp: Ranks = SINGLE_RANK,
) -> Batch:
    """Make a batch of whole sequences without a KV cache, for logits and finetuning.

    Args:
        virtual: number of virtual tokens before each sequence; none by default.
        keeps: True if they are trained on.
        cp: ranks that share the tokens; the batch has those of this one.
    """
    before = virtual or (0,) * len(sequences)
    lengths = [count + len(one) for one, count in zip(sequences, before, strict=True)]
    parts = TokenParts(lengths, cp, device) if cp.size > 1 else None
    pieces = [Piece(number, 0, length) for number, length in enumerate(lengths)]
    origins = [0, *accumulate(lengths)]
    spans: list[Span] = []
    ids: list[int] = []
    for number, start, stop in pieces if parts is None else parts.own:
        count = before[number]
        held = max(min(stop, count) - start, 0)
        place = (None, held, origins[number], number)
        spans.append(Span(len(ids), stop - start, start, *place))
        ids += [ANY_TOKEN] * held
        ids += sequences[number][max(start - count, 0) : stop - count] if stop > count else ()
    batch = Batch(uploaded_list(ids, torch.int64, device), spans, keeps=keeps)
    batch.parts = parts
    return batch


def mixed_seed(*numbers: int) -> int:
    """Mix numbers into a seed that differs for any two sequences, alike on every platform."""
    digest = hashlib.sha256(":".join(map(str, numbers)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
