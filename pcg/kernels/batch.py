"""A step's tokens as emitted programs and kernels read them; the runtime makes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pcg.kernels.adapter_batch import AdapterSlot
from pcg.ranks.context_parallel import TokenParts
from pcg.ranks.group import Ranks


class BlockTable(Protocol):
    """The pages of a sequence in the KV cache.

    Pages only grow in number, but for those that are `replaced` by others so many times.
    """

    pages: list[int]
    replaced: int

    @property
    def run_row(self) -> int:
        """The cache's row of the first token where the pages are a run, else -1."""

    @property
    def stop_row(self) -> int:
        """The row after those of a run and of the free pages behind it that are kept for it."""

    def rows(self, start: int, stop: int) -> range | list[int]:
        """The cache's rows of tokens; a range where the pages are a run."""


class Span(NamedTuple):
    """One sequence's tokens in a batch.

    Attributes:
        start: index of its first token in the batch.
        length: tokens in the batch.
        context: tokens before them, in the KV cache.
        table: pages of the sequence in the KV cache; None without one.
        virtual: number of its first tokens that are of its adapter's prompt, and have no ids.
        origin: in training, tokens of the pass before the sequence's first, whoever has them.
        number: in training, the sequence's index in the pass.
    """

    start: int
    length: int
    context: int = 0
    table: BlockTable | None = None
    virtual: int = 0
    origin: int = 0
    number: int = 0


@dataclass(frozen=True, slots=True)
class DroppedPart:
    """Tokens that dropout draws random numbers for together.

    `count` tokens from `start` are in the batch; `skipped` of the part's `whole` come before them.
    """

    start: int
    count: int
    skipped: int
    whole: int
    generator: torch.Generator


class DroppedTokens(NamedTuple):
    """The tokens that a device draws the random numbers of dropout for.

    Attributes:
        key: [2], int64: the pass's key, and 0 if nothing is dropped.
        positions: position of each token in its sequence, [T].
        sequences: index of each token's sequence in the pass, [T].
    """

    key: Tensor
    positions: Tensor
    sequences: Tensor


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences of one new token each that attention takes in one call.

    Attributes:
        tokens: their indices in the batch, [count].
        row: first row that the first one attends to.
        stride: rows from one sequence's first to the next one's.
        longest: rows that the longest attends to.
        mask: [count, 1, 1, longest], added to the logits; None where all are equally long.
        rows: [count, longest], the rows that they attend to where these lie at unequal distances.
    """

    tokens: Tensor
    row: int
    stride: int
    longest: int
    mask: Tensor | None
    rows: Tensor | None = None


@dataclass(frozen=True)
class StepTokens:
    """The tokens of a step that may be recorded, by sequence.

    Attributes:
        ids: the tokens of all sequences, one sequence's behind the other's.
        lengths: tokens of each sequence in the step.
        contexts: tokens of each before these, in the cache.
        slots: slot of each one's adapter.
        read: places of the sequences behind whose last tokens logits are read.
    """

    ids: Sequence[int]
    lengths: Sequence[int]
    contexts: Sequence[int]
    tables: Sequence[BlockTable]
    slots: Sequence[AdapterSlot]
    read: Sequence[int]


class KvGradients:
    """One layer's gradients of the keys and values of all tokens of a training pass.

    They are those of keys after rotary embedding, [tokens, kv_heads, head_dim], in fp32 at least,
    and add up from the last window to the first; what a window finds of its own tokens is final
    (FlexLLM v2 §6.1, figure 8).
    """

    def __init__(self, keys: Tensor, values: Tensor, tokens: int) -> None:
        """Start with zeros for so many tokens of keys and values as the layer's cache has them."""
        self.keys, self.values = (_zeros(rows, tokens) for rows in (keys, values))


def _zeros(rows: Tensor, tokens: int) -> Tensor:
    heads, _, size = rows.shape[-3:]
    dtype = torch.promote_types(rows.dtype, torch.float32)
    return torch.zeros((tokens, heads, size), dtype=dtype, device=rows.device)


class ProgramBatch(Protocol):
    """A token-flat batch, as the functions of emitted programs read it.

    Attributes:
        input_ids: [T], int64.
        spans: cover all tokens, in order.
        longer_spans: those of more than one token.
        uniform_length: the spans' length where all are whole sequences of one length, else 0.
        layer: index of the layer that runs; the runner sets it.
        ranks: the group that runs it, each rank on its part; the runner sets it.
        parts: how ranks share the tokens of sequences, of which this batch has one rank's; None
            where it has all.
        keeps: True if it is trained on, so that attention returns the log-sum-exp for backward.
        gradients: gradients of the keys and values of the layer whose backward runs; None where
            whole sequences are trained on, without a cache.
        rows: the cache's row of each token, [T]; negative for tokens that are not written; None
            without a cache.
        rows_of_all: the cache's row of each token of all ranks that share them; None where they
            share none, or keep no cache.
        virtual_rows: indices of the virtual tokens, [v]; None where there are none.
        virtual_places: index of each of them in its adapter's prompt, [v]; None likewise.
        chosen: the tokens that the epilogue gets; None for all.
        logits_on_first: True if of several ranks the first alone gets the epilogue's logits.
        known: tables that kernels make of the batch, for all layers.
    """

    input_ids: Tensor
    spans: Sequence[Span]
    longer_spans: Sequence[Span]
    uniform_length: int
    layer: int
    ranks: Ranks
    parts: TokenParts | None
    keeps: bool
    gradients: KvGradients | None
    rows: Tensor | None
    rows_of_all: Tensor | None
    virtual_rows: Tensor | None
    virtual_places: Tensor | None
    chosen: Tensor | None
    logits_on_first: bool
    known: dict[object, Any]

    @property
    def tokens(self) -> int:
        """T of the graph that runs: all tokens, or those that the epilogue gets."""

    @property
    def cached(self) -> tuple[Tensor, Tensor] | None:
        """The layer's cache: keys and values of all rows, [K, rows, D], or in pages; or None."""

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
        """Write keys and values into the layer's cache, those of other ranks' tokens, too.

        Returns `cached`.
        """

    def seen(self, span: Span) -> slice | Tensor:
        """The rows of the cache that hold a sequence up to the end of its span."""

    def decode_groups(self, window: int) -> Sequence[DecodeGroup]:
        """The spans of one token, in groups; `window` limits the rows attended to, 0 does not."""

    def dropped_parts(self, key: int) -> Sequence[DroppedPart]:
        """Parts that cover all tokens in order, the same for each call; none without dropout."""

    def dropped_tokens(self) -> DroppedTokens | None:
        """All tokens, as kernels draw for them; None without dropout."""
