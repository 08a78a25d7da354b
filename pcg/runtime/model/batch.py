"""A token-flat batch: the concatenated tokens of all sequences of a step.

Decode groups: sequences with a single new token each, grouped by calls of attention. Sequences with
rows at equal distances in the cache share a call; so do sequences with scattered rows, which are
gathered. A group's longest sequence may be at most twice as long as the mean, as reading masked
rows costs less than another call. Masked rows are read, too, and a NaN in them would reach the
result, so they never belong to another sequence: shorter sequences read their reserved free pages,
which hold zeros, or their own first row again.

Latest tokens: the tokens of the previous step stay in the device's memory, so that the next step
can read them before the host does. The id of such a token is -1 - its index in the previous step:

    id = ids[i]                       if ids[i] ≥ 0
       = max(latest[-1 - ids[i]], 0)  else

The maximum is for a sequence without a drawn token, which fails when the result is read.

Source: mini-sglang's and SGLang's map of future tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pcg.ir.operators.bypass import DROPOUT_TOKENS
from pcg.kernels.batch import (
    BlockTable,
    DecodeGroup,
    DecodeRows,
    DroppedPart,
    DroppedTokens,
    KvGradients,
    ProgramBatch,
    Routes,
    SequenceStates,
    Span,
)
from pcg.kernels.devices import uploaded, uploaded_list
from pcg.kernels.sizes import PAGE_TOKENS
from pcg.kernels.torch.host_kernels import append
from pcg.ranks.group import SINGLE_RANK, Ranks
from pcg.ranks.step_parts import Piece, TokenParts
from pcg.runtime.memory.kv_cache import KvCache


@dataclass(frozen=True, slots=True)
class Singles:
    """Sequences with a single new token each, by column.

    Attributes:
        tokens: indices of the tokens in the batch, [n].
        first_rows: the cache row of each first token if the pages are a run, else -1, [n].
        stop_rows: the row after each run and its reserved free pages, [n].
        lengths: length of each sequence, including the new token, [n].
    """

    tokens: NDArray[np.int64]
    first_rows: NDArray[np.int64]
    stop_rows: NDArray[np.int64]
    lengths: NDArray[np.int64]
    tables: Sequence[BlockTable]


def decode_groups(
    singles: Singles, reach: int, dtype: torch.dtype, device: torch.device
) -> list[DecodeGroup]:
    """Group sequences.

    Args:
        reach: the maximum number of rows that a token attends to; negative for a chunk, 0 for all.
    """
    if not len(singles.tokens):
        return []
    lengths, first_rows = singles.lengths, singles.first_rows
    counts = _seen_rows(lengths, reach)
    rows = np.where(first_rows < 0, -1, first_rows + lengths - counts)
    order = rows.argsort(kind="stable")
    counts = counts[order]
    rooms = singles.stop_rows - rows
    runs = list(_runs(rows[order].tolist(), counts.tolist(), rooms[order].tolist()))
    sizes = [run.size for run in runs]
    tokens = torch.from_numpy(singles.tokens[order]).to(device).split(sizes)
    most = max(run.longest for run in runs)
    line = torch.full((2 * most,), float("-inf"), dtype=dtype, device=device)
    line[:most] = 0.0
    hides = torch.from_numpy(most - counts).to(device).split(sizes)
    groups: list[DecodeGroup] = []
    start = 0
    for run, group_tokens, hidden in zip(runs, tokens, hides, strict=True):
        longest, mask, gathered = run.longest, None, None
        if run.total < longest * run.size:
            # Row i of these shows its first most - i places. They are windows of a line; copying
            # them takes a tenth of the time of comparing places with counts.
            windows = line.as_strided((most, longest), (1, 1))
            mask = windows.index_select(0, hidden).view(run.size, 1, 1, longest)
        row = run.row
        if row < 0:
            part = order[start : start + run.size]
            ends = zip(part.tolist(), lengths[part].tolist(), strict=True)
            tables = [(singles.tables[i], end) for i, end in ends]
            seen = counts[start : start + run.size].tolist()
            row, gathered = 0, _gathered(tables, seen, longest).to(device)
        groups.append(DecodeGroup(group_tokens, row, run.stride, longest, mask, gathered))
        start += run.size
    return groups


def _seen_rows(lengths: NDArray[np.int64], reach: int) -> NDArray[np.int64]:
    """Return the numbers of rows that the last tokens of sequences attend to."""
    if reach < 0:
        return (lengths - 1) % -reach + 1
    return np.minimum(lengths, reach) if reach else lengths


def decode_rows(singles: Singles, reach: int) -> DecodeRows:
    """Return the rows of sequences; `reach` as for `decode_groups`."""
    lengths, first_rows = singles.lengths, singles.first_rows
    counts = _seen_rows(lengths, reach)
    spans = np.stack((first_rows + lengths - counts, counts), 1)
    sizes = np.ones_like(counts)
    scattered = np.flatnonzero(first_rows < 0).tolist()
    if scattered:
        every = np.split(spans, len(spans))
        for i in scattered:
            end = int(lengths[i])
            every[i] = _spans(singles.tables[i].pages, end - int(counts[i]), end)
        spans, sizes = np.concatenate(every), _column([len(part) for part in every])
    numbers = np.stack((singles.tokens, counts, sizes.cumsum() - sizes, sizes), 1)
    return DecodeRows(np.concatenate((numbers.ravel(), spans.ravel())), len(counts))


def _spans(pages: Sequence[int], start: int, stop: int) -> NDArray[np.int64]:
    """Return first row and rows of a sequence's pages from a place to another, [pages, 2]."""
    first = start // PAGE_TOKENS
    rows = _column(pages[first : -(-stop // PAGE_TOKENS)]) * PAGE_TOKENS
    places = (first + np.arange(len(rows))) * PAGE_TOKENS
    skipped = np.maximum(start - places, 0)
    ends = np.minimum(stop - places, PAGE_TOKENS)
    return np.stack((rows + skipped, ends - skipped), 1)


class _Run(NamedTuple):
    """Neighbouring sequences of the same group.

    Attributes:
        row: the first row that the first sequence attends to; -1 if they are gathered.
        stride: rows from one sequence to the next; 0 for a single sequence, or if they are
            gathered.
    """

    row: int
    size: int
    stride: int
    longest: int
    total: int


def _runs(rows: Sequence[int], counts: Iterable[int], rooms: Sequence[int]) -> Iterator[_Run]:
    size = stride = longest = total = 0
    first = before = rows[0]
    least = rooms[0]
    for row, count, room in zip(rows, counts, rooms, strict=True):
        step, most = row - before, max(longest, count)
        # Add the sequence if it has the group's distance, or the group is gathered.
        if before < 0:
            is_reached = row < 0
        else:
            is_reached = most <= min(least, room) and (size == 1 or step == stride)
        if size and not (is_reached and most * (size + 1) <= 2 * (total + count)):
            yield _Run(first, size, stride, longest, total)
            first, size, stride, most, total, least = row, 0, 0, count, 0, room
        elif size:
            stride = step
        size, longest, total, before = size + 1, most, total + count, row
        least = min(least, room)
    yield _Run(first, size, stride, longest, total)


def _gathered(
    ends: Iterable[tuple[BlockTable, int]], counts: Sequence[int], longest: int
) -> Tensor:
    """Return the rows that sequences attend to, [count, longest], padded by first rows."""
    rows = np.empty((len(counts), longest), dtype=np.int64)
    within = np.arange(PAGE_TOKENS)
    for line, (table, end), count in zip(rows, ends, counts, strict=True):
        page, skipped = divmod(end - count, PAGE_TOKENS)
        pages = np.array(table.pages[page : -(-end // PAGE_TOKENS)])
        line[:count] = (pages[:, None] * PAGE_TOKENS + within).ravel()[skipped : skipped + count]
        line[count:] = line[0]
    return torch.from_numpy(rows)


class LatestTokens:
    """The tokens of the latest step, in fixed memory.

    Args:
        most: the maximum number of tokens of a step.
    """

    def __init__(self, most: int, device: torch.device) -> None:
        self._memory = torch.zeros(most, dtype=torch.int64, device=device)
        self._places: dict[str, int] = {}

    def put(self, owners: Sequence[str], tokens: Tensor) -> None:
        """Replace the kept tokens by [n] new ones; the owners are ids of sequences."""
        self._memory[: len(tokens)].copy_(tokens)
        self._places = {owner: place for place, owner in enumerate(owners)}

    def id_of(self, owner: str) -> int:
        """Return the placeholder id of an owner's token in the next step."""
        return -1 - self._places[owner]

    def resolved(self, ids: Tensor) -> Tensor:
        """Return ids [T] with placeholders replaced by tokens."""
        latest = self._memory[(-1 - ids).clamp(min=0)].clamp(min=0)
        return torch.where(ids < 0, latest, ids)


ANY_TOKEN = 0
"""The placeholder id of a virtual token, valid in every vocabulary."""


class Batch(ProgramBatch):
    """Tokens, positions and spans of a step; see `ProgramBatch` for the interface of programs.

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
        self.is_alone = False
        self.keeps = keeps
        self.gradients: KvGradients | None = None
        self.states: SequenceStates | None = None
        self.routes: Routes | None = None
        self.rows: Tensor | None = None
        self.rows_of_all: Tensor | None = None
        self.known: dict[object, Any] = {}
        self._cache = cache
        self._groups: dict[int, list[DecodeGroup]] = {}
        self._decode_rows: dict[int, DecodeRows] = {}
        self._seen: dict[int, slice | Tensor] = {}
        # A single call for all sequences, as the lists change every step.
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
            if cache.states is not None and not keeps:
                self.states = cache.states.of(self.spans, input_ids.device)
        self.virtual_rows: Tensor | None = None
        self.virtual_places: Tensor | None = None
        if any(virtual):
            pairs = [(s.start + i, s.context + i) for s in self.spans for i in range(s.virtual)]
            numbers = torch.tensor(list(zip(*pairs, strict=True)))
            self.virtual_rows, self.virtual_places = uploaded(numbers, input_ids.device)
        whole = len(set(lengths)) == 1 and not any(contexts)
        self.uniform_length = lengths[0] if whole else 0
        self.longer_spans = [self.spans[i] for i in np.flatnonzero(self._lengths != 1).tolist()]

    @property
    def tokens(self) -> int:
        """Number of tokens to run: all, or the tokens that the epilogue reads."""
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
        """Return the parts of all tokens for a random operator, by the operator's key in the layer.

        The result is empty without dropout.
        """
        if self.dropout_seed is None:
            return []
        return [part for span in self.spans for part in self.random_parts(span, key)]

    def random_parts(self, span: Span, key: int) -> Iterator[DroppedPart]:
        """Yield the parts of a span's tokens for a random operator."""
        assert self.dropout_seed is not None
        place, end = span.context, span.context + span.length
        while place < end:
            part, skipped = divmod(place, DROPOUT_TOKENS)
            count = min(end - place, DROPOUT_TOKENS - skipped)
            seed = mixed_seed(self.dropout_seed, span.number, part, self.layer, key)
            generator = torch.Generator(self.input_ids.device).manual_seed(seed)
            start = span.start + place - span.context
            yield DroppedPart(start, count, skipped, DROPOUT_TOKENS, generator)
            place += count

    def dropped_tokens(self) -> DroppedTokens | None:
        """Return the inputs of dropout on a device; None without dropout."""
        if self.dropout_seed is None:
            return None
        if "dropped" not in self.known:
            numbers = _column([span.number for span in self.spans]).repeat(self._lengths)
            key = uploaded_list([self.dropout_seed, 1], torch.int64, self.input_ids.device)
            places = self.positions, self._on_device(numbers)
            self.known["dropped"] = DroppedTokens(key, *places)
        dropped: DroppedTokens = self.known["dropped"]
        return dropped

    def last_tokens(self, places: Sequence[int]) -> Tensor:
        """Return the index of the last token of each given span, [places]."""
        chosen = _column(places)
        return self._on_device(self._starts[chosen] + self._lengths[chosen] - 1)

    def decode_groups(self, reach: int) -> list[DecodeGroup]:
        """Return the spans of a single token, in groups for a call of attention each."""
        if reach not in self._groups:
            assert self._cache is not None
            dtype, device = self._cache.keys[self.layer].dtype, self.input_ids.device
            self._groups[reach] = decode_groups(self._singles(), reach, dtype, device)
        return self._groups[reach]

    def decode_rows(self, reach: int) -> DecodeRows:
        """Return the rows of the spans of a single token, as `decode_groups` does."""
        if reach not in self._decode_rows:
            self._decode_rows[reach] = decode_rows(self._singles(), reach)
        return self._decode_rows[reach]

    def _singles(self) -> Singles:
        chosen = np.flatnonzero(self._lengths == 1)
        tables = [self._tables[i] for i in chosen.tolist()]
        return Singles(
            self._starts[chosen],
            self._first_rows[chosen],
            _column([table.stop_row for table in tables]),
            self._contexts[chosen] + 1,
            tables,
        )

    def seen(self, span: Span) -> slice | Tensor:
        """Return the cache rows of a sequence up to the end of its span."""
        seen = self._seen.get(span.start)
        if seen is None:
            rows = _rows(span, 0, span.context + span.length)
            if isinstance(rows, range):
                seen = slice(rows.start, rows.stop)
            else:
                seen = uploaded(torch.tensor(rows), self.input_ids.device)
            self._seen[span.start] = seen
        return seen

    @property
    def cached(self) -> tuple[Tensor, Tensor] | None:
        """Keys and values of this layer's rows, [K, rows, D]; None without a cache."""
        if self._cache is None:
            return None
        return self._cache.keys[self.layer], self._cache.values[self.layer]

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
        """Write this layer's keys and values of the tokens; return all rows, or None uncached.

        Each rank writes all tokens that ranks share.
        """
        if self.cached is None:
            return None
        keys, values = self.cached
        rows = self.rows
        if self.parts is not None:
            k, v = self.parts.gathered(k, v)
            rows = self.rows_of_all
        assert rows is not None
        append(keys, k, rows)
        append(values, v, rows)
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
    """Create a batch of whole sequences without a KV cache, for logits and finetuning.

    Args:
        virtual: number of virtual tokens before each sequence; none by default.
        keeps: True for training.
        cp: ranks that share the tokens; the batch has this rank's tokens.
    """
    before = virtual or (0,) * len(sequences)
    lengths = [count + len(sequence) for sequence, count in zip(sequences, before, strict=True)]
    parts = TokenParts(lengths, cp, device) if cp.size > 1 else None
    pieces = [Piece(number, 0, length) for number, length in enumerate(lengths)]
    origins = [0, *accumulate(lengths)]
    spans: list[Span] = []
    ids: list[int] = []
    for number, start, stop in pieces if parts is None else parts.pieces:
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
    """Mix numbers into a seed, equal on every platform and different for any two sequences."""
    digest = hashlib.sha256(":".join(map(str, numbers)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
