"""The batch of a step's sequences, and the rows of the batch to read afterwards."""

from __future__ import annotations

from collections.abc import Sequence as List
from itertools import pairwise
from typing import NamedTuple, cast

import torch
from torch import Tensor

from pcg.ir.program.program import routed_layers
from pcg.kernels.batch import Routes, Span
from pcg.kernels.devices import uploaded, uploaded_list
from pcg.kernels.torch.products import ProductRequest
from pcg.peft.adapter import Adapter
from pcg.ranks.group import SINGLE_RANK, Ranks
from pcg.ranks.step_parts import TokenParts
from pcg.runtime.adapters.padded_tables import BoundAdapters, PaddedTables
from pcg.runtime.memory.kv_cache import KvCache
from pcg.runtime.memory.pool import PageTable
from pcg.runtime.model.batch import Batch, LatestTokens
from pcg.runtime.model.runner import ModelRunner
from pcg.runtime.model.step_graphs import StepGraphs, StepOutputs
from pcg.runtime.requests.sequence import Sequence


class ReadRows(NamedTuple):
    """Consecutive rows of a batch that a request reads.

    Attributes:
        first: the first row.
        tokens: positions of the rows' tokens in the sequence.
    """

    sequence: Sequence
    first: int
    tokens: range

    @property
    def rows(self) -> range:
        return range(self.first, self.first + len(self.tokens))

    @property
    def places(self) -> range:
        """The prompt positions of the tokens that follow the rows' tokens."""
        virtual = self.sequence.request.virtual_tokens
        return range(self.tokens.start + 1 - virtual, self.tokens.stop + 1 - virtual)

    @property
    def behind(self) -> tuple[int, ...]:
        """The tokens that follow the rows' tokens, which the rows predict."""
        places = self.places
        return self.sequence.request.prompt_ids[places.start : places.stop]


class ServedBatch:
    """The sequences of a step, in the order of their adapters' slots.

    Attributes:
        ids: tokens of all sequences; tokens ahead have the ids of `LatestTokens`.
        spans: the tokens of each sequence.
        ready: indices of the sequences to sample.
        scored: rows of prompts for log-probabilities.
        pooled: rows of prompts for last hidden states.
        routed: sequences with recorded experts, their first token, and their rows.
        batch, bound: the batch and its adapters on the device, after `put`.
        parts: parts of the batch, or of this rank's share, to run in sequence; later parts read
            keys and values of earlier parts.
    """

    def __init__(
        self,
        chunks: List[tuple[Sequence, int]],
        adapters: List[Adapter | None],
        latest: LatestTokens,
    ) -> None:
        self.chunks = chunks
        self._latest = latest
        self.adapters = adapters
        self.ready: list[int] = []
        self.scored: list[ReadRows] = []
        self.pooled: list[ReadRows] = []
        self.routed: list[tuple[Sequence, int, slice]] = []
        self.ids: list[int] = []
        self.spans: list[Span] = []
        self.batch: Batch
        self.bound: BoundAdapters
        self.parts: list[tuple[Batch, BoundAdapters]] = []
        ids = self.ids
        for place, (sequence, count) in enumerate(chunks):
            start, virtual, generated = sequence.cached, 0, sequence.generated
            end = start + count
            if end == sequence.length and sequence.limit:
                self.ready.append(place)
            first = len(ids)
            if sequence.rows is not None and (unread := sequence.rows.unread(start, end)):
                read = self.scored if sequence.request.pooling is None else self.pooled
                read.append(ReadRows(sequence, first + unread.start - start, unread))
            if sequence.routes is not None:
                self.routed.append((sequence, start, slice(first, first + count)))
            if sequence.ahead:
                ids.append(latest.id_of(sequence.id))
            elif generated and count == 1 and end == sequence.length:
                ids.append(generated[-1])
            else:
                ids += sequence.ids(start, end)
                virtual = max(0, min(end, sequence.request.virtual_tokens) - start)
            self.spans.append(Span(first, count, start, sequence.table, virtual))

    def put(
        self,
        tables: PaddedTables,
        cache: KvCache,
        device: torch.device,
        runner: ModelRunner,
        cp: Ranks = SINGLE_RANK,
    ) -> None:
        """Create the batch on the device, and bind the adapters.

        Args:
            cp: the ranks that may share the batch's tokens.
        """
        ids = uploaded_list(self.ids, torch.int64, device)
        if min(self.ids) < 0:
            ids = self._latest.resolved(ids)
        self.batch = Batch(ids, self.spans, cache)
        self.bound = tables.bind(self.adapters, [span.length for span in self.spans])
        self.parts = cut(self.batch, self.adapters, tables, cache, runner, cp)
        if self.routed:
            self.batch.routes = self._routes(runner)

    def _routes(self, runner: ModelRunner) -> Routes:
        """Record the tokens' experts; tokens that are computed again choose the same ones."""
        layers, chosen, _ = routed_layers(runner.model)
        replayed = torch.full((len(self.ids), len(layers), chosen), -1, dtype=torch.int16)
        for sequence, start, rows in self.routed:
            assert sequence.routes is not None
            again = sequence.routes.rows()[start : start + rows.stop - rows.start]
            if again:
                replayed[rows.start : rows.start + len(again)] = torch.stack(again)
        is_replay = bool((replayed >= 0).any())
        on_device = uploaded(replayed, self.batch.input_ids.device) if is_replay else None
        return Routes(layers, on_device)

    def hidden_requests(self, runner: ModelRunner) -> ProductRequest[list[Tensor]]:
        """Take the batch through the layers; see `ModelRunner.hidden_requests`."""
        return hidden_requests(self.parts, runner)

    def run_recorded(self, graphs: StepGraphs) -> StepOutputs | None:
        """Replay the step by a graph; return None without any effect if no graph fits."""
        if self.scored or self.pooled:
            graphs.eager["rows of prompts are read"] += 1
            return None
        if any(span.virtual for span in self.spans):
            graphs.eager["a prompt has virtual tokens"] += 1
            return None
        return graphs.run(
            self.ids,
            [(span.length, span.context) for span in self.spans],
            [cast(PageTable, span.table) for span in self.spans],
            self.adapters,
            self.ready,
        )

    @property
    def is_decode(self) -> bool:
        """True if all that is read of the step are the logits of all tokens, after `put`."""
        reads = self.scored or self.pooled or self.routed
        return not reads and len(self.parts) == 1 and len(self.ready) == len(self.ids)

    @property
    def has_logprobs(self) -> bool:
        """True if a request needs logprobs of its tokens."""
        # Followers have the parameters of the first continuation.
        asking = [place for place in self.ready if self.chunks[place][0].likeliest is not None]
        return bool(asking)

    def sampled_rows(self, tables: PaddedTables) -> tuple[Tensor | None, BoundAdapters | None]:
        """Return the rows to sample from, and their adapters; None for all rows."""
        if len(self.batch.input_ids) == len(self.ready):
            return None, None
        adapters = [self.adapters[i] for i in self.ready]
        return self.batch.last_tokens(self.ready), tables.bind_epilogue(adapters)


def cut(
    batch: Batch,
    adapters: List[Adapter | None],
    tables: PaddedTables,
    cache: KvCache,
    runner: ModelRunner,
    cp: Ranks = SINGLE_RANK,
) -> list[tuple[Batch, BoundAdapters]]:
    """Return this rank's parts of a batch, and the adapters of each part.

    Args:
        adapters: the adapters of the batch's spans.
        cp: ranks that may share the tokens.
    """
    tokens, whole = batch.tokens, [(batch, adapters)]
    if (parts := runner.parts_of(tokens)) > 1:
        bounds = [tokens * part // parts for part in range(parts + 1)]
        whole = [_part(batch, adapters, *places, cache) for places in pairwise(bounds)]
    if cp.size > 1 and runner.shares(batch):
        whole = [_shared(part, of_part, cache, cp) for part, of_part in whole]
    return [
        (part, tables.bind(of_part, [span.length for span in part.spans]))
        for part, of_part in whole
    ]


def hidden_requests(
    parts: List[tuple[Batch, BoundAdapters]], runner: ModelRunner
) -> ProductRequest[list[Tensor]]:
    """Run the parts of `cut` through the layers; return the epilogue's inputs for all tokens."""
    if len(parts) == 1 and parts[0][0].parts is None:
        # No wrapping generator: each product of a step would resume it, too.
        return runner.hidden_requests(*parts[0])
    return _joined_requests(parts, runner)


def _joined_requests(
    parts: List[tuple[Batch, BoundAdapters]], runner: ModelRunner
) -> ProductRequest[list[Tensor]]:
    hidden_of_parts = []
    for part in parts:
        hidden_of_parts.append((yield from runner.hidden_requests(*part)))  # noqa: PERF401
    whole = hidden_of_parts[0]
    if not runner.is_last:
        return whole
    for place, state in enumerate(whole):
        if isinstance(state, Tensor):  # a batch in parts has no pending LoRA
            whole[place] = torch.cat(
                [
                    hidden[place] if of is None else of.gathered(hidden[place])[0]
                    for hidden, of in zip(
                        hidden_of_parts, (batch.parts for batch, _ in parts), strict=True
                    )
                ]
            )
    return whole


def _part(
    batch: Batch, adapters: List[Adapter | None], start: int, stop: int, cache: KvCache
) -> tuple[Batch, List[Adapter | None]]:
    """Return tokens `start` to `stop - 1` of a batch, and the adapters of their spans."""
    spans, chosen = list[Span](), list[Adapter | None]()
    for span, adapter in zip(batch.spans, adapters, strict=True):
        first, end = max(span.start, start), min(span.start + span.length, stop)
        if first < end:
            spans.append(_part_of(span, first - span.start, end - span.start, first - start))
            chosen.append(adapter)
    return Batch(batch.input_ids[start:stop], spans, cache), chosen


def _part_of(span: Span, start: int, stop: int, place: int) -> Span:
    """Return tokens `start` to `stop - 1` of a span, as a span at `place` of another batch."""
    virtual = min(max(span.virtual - start, 0), stop - start)
    return Span(place, stop - start, span.context + start, span.table, virtual)


def _shared(
    batch: Batch, adapters: List[Adapter | None], cache: KvCache, cp: Ranks
) -> tuple[Batch, List[Adapter | None]]:
    """Return this rank's tokens of a batch, and their adapters."""
    device = batch.input_ids.device
    parts = TokenParts([span.length for span in batch.spans], cp, device)
    spans, chosen = list[Span](), list[int]()
    for piece in parts.pieces:
        span = batch.spans[piece.sequence]
        spans.append(_part_of(span, piece.start, piece.stop, len(chosen)))
        chosen += range(span.start + piece.start, span.start + piece.stop)
    ids = batch.input_ids[uploaded_list(chosen, torch.int64, device)]
    part = Batch(ids, spans, cache)
    part.parts, part.rows_of_all = parts, batch.rows
    return part, [adapters[piece.sequence] for piece in parts.pieces]


def rows_of(read: List[ReadRows]) -> tuple[list[int], list[Adapter | None]]:
    """Return the row numbers, and the adapter of each row."""
    rows = [row for rows_read in read for row in rows_read.rows]
    adapters = [rows_read.sequence.request.adapter for rows_read in read for _ in rows_read.tokens]
    return rows, cast("list[Adapter | None]", adapters)
