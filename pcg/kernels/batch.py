"""A step's tokens and adapters as emitted programs and kernels read them; the runtime makes them.

A program's adapter parameter is a `SegmentedWeight`, a `JoinedLora` or `LoraRows`; None where no
adapter of the batch has a weight at the site; or a tuple of these where adapters of several widths
run. In training it is the adapter's `pcg.peft.weights.AdapterWeight`, or a tensor computed from
several.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pcg.kernels.devices import uploaded
from pcg.ranks.group import Ranks
from pcg.ranks.step_parts import TokenParts

Result = TypeVar("Result")


def once(known: dict[Any, Any], key: object, make: Callable[[], Result]) -> Result:
    """Return a value of a batch or a site; the first call computes it."""
    if key not in known:
        known[key] = make()
    value: Result = known[key]
    return value


class GatheredRows(NamedTuple):
    """The token of each row of a batched product, [adapters · size]; its tokens and their rows."""

    gather: Tensor
    tokens: Tensor
    places: Tensor


@dataclass(frozen=True)
class Segments:
    """The tokens of each adapter.

    Segments of the most common size are one batched product, whose results for other slots are
    dropped. Each of the others is a product.

    Attributes:
        start: first token with an adapter; `stop` is the end.
        sizes: tokens of each adapter, in the order of the stacks; 0 where it does not run.
        size: tokens of each segment of the batched product; 0 without such a product.
        gathered: rows of the batched product, tokens counted from start; None if all tokens are in
            it, in order, or there is none.
        loose: index in the stacks, first token and end, from start, of each other segment.
        known: tables that kernels derive.
    """

    start: int
    stop: int
    sizes: tuple[int, ...]
    size: int
    gathered: GatheredRows | None = None
    loose: tuple[tuple[int, int, int], ...] = ()
    known: dict[object, Any] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, start: int, sizes: Sequence[int], device: torch.device) -> Self:
        """Make segments of these sizes; tokens before `start` have no adapter."""
        stop = start + sum(sizes)
        counts = Counter(sizes)
        counts.pop(0, None)
        size, count = max(counts.items(), key=lambda item: item[1])
        if count == len(sizes):
            return cls(start, stop, tuple(sizes), size)
        lengths = np.array(sizes)
        firsts = lengths.cumsum() - lengths
        is_batched = (lengths == size) & (count > 1 and 2 * count >= len(sizes))
        others = np.flatnonzero((lengths > 0) & ~is_batched)
        ends = firsts + lengths
        loose = zip(others.tolist(), firsts[others].tolist(), ends[others].tolist(), strict=True)
        if not is_batched.any():
            return cls(start, stop, tuple(sizes), 0, loose=tuple(loose))
        batched, within = np.flatnonzero(is_batched), np.arange(size)
        tokens = (firsts[batched, None] + within).ravel()
        places = (batched[:, None] * size + within).ravel()
        gather = np.zeros(len(sizes) * size, dtype=np.int64)
        gather[places] = tokens
        rows = (uploaded(torch.from_numpy(x), device) for x in (gather, tokens, places))
        return cls(start, stop, tuple(sizes), size, GatheredRows(*rows), tuple(loose))

    @property
    def is_batched(self) -> bool:
        """True if all tokens are in the batched product, in order."""
        return bool(self.size) and self.gathered is None


@dataclass(frozen=True)
class SegmentedWeight:
    """The weights of a batch's adapters at one site.

    Attributes:
        weight: [adapters, in, out], scaled; of a bias [adapters, 1, out]. A matrix is a transposed
            view: the factors of one output are contiguous.
        present: for each adapter, True if it has a weight; else its part of the stack is zeros, or
            ones where the program scales by it.
    """

    weight: Tensor
    segments: Segments
    present: tuple[bool, ...]


@dataclass(frozen=True)
class OwnWeights:
    """The weights of a batch's adapters that replace the base's at a site; None without one."""

    weights: tuple[Tensor | None, ...]
    segments: Segments


@dataclass(frozen=True)
class LoraRun:
    """B of neighbouring outputs of the same size.

    Attributes:
        b: [adapters, outputs, out, rank], scaled; stored as [adapters, outputs, rank, out] for the
            native kernel.
        column: the first output's first column, of the columns with LoRA.
        row: the first output's first row, of the joined A's products.
        is_whole: True if these are all columns and all rows.
    """

    b: Tensor
    column: int
    row: int
    is_whole: bool


@dataclass(frozen=True)
class JoinedLora:
    """The LoRA of a batch's adapters at linear operators with the same input.

    Attributes:
        column: first column of the joined product that can have LoRA.
        columns: columns from there to the end of the last output that can have LoRA.
        a: [adapters, ranks, in], the ranks of all outputs in a row.
        runs: B of the outputs that have LoRA, in the fewest runs, zeros between them included.
        parts: the same without such zeros.
        known: tables that kernels derive from these weights, for all steps.
    """

    column: int
    columns: int
    a: Tensor
    runs: tuple[LoraRun, ...]
    parts: tuple[LoraRun, ...]
    known: dict[str, Any]
    segments: Segments


class AdapterSlot(NamedTuple):
    """The place of an adapter in tables.

    Attributes:
        number: its column in tables of ranks; -1 without an adapter.
        first: its first entry in the table of rows.
        width: entries of each of its matrices: its greatest rank anywhere, rounded up.
    """

    number: int
    first: int
    width: int


NO_SLOT = AdapterSlot(-1, 0, 0)
"""The slot of tokens without an adapter."""


@dataclass(frozen=True)
class TokenSpans:
    """First token, tokens and slot of neighbours with the same adapter; `known` holds tables.

    Attributes:
        defers: True if LoRA may be left to the kernel that reads a product's sum.
    """

    spans: tuple[tuple[int, int, AdapterSlot], ...]
    defers: bool = True
    known: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LoraRows:
    """LoRA or bottlenecks of a batch's adapters at linear operators with the same input, in rows.

    An adapter has the same number of entries in `rows` for each of its matrices (`AdapterSlot`),
    matrix after matrix. A site's matrices are A of each output, scaled Bᵀ of each, and the
    bias.

    Attributes:
        memory: flat, of the adapters' dtype.
        rows: first element of each row of each matrix, int64.
        first: number of the site's first matrix among all.
        ranks: rank of each output and slot, [outputs, slots], int32; 0 without LoRA.
        in_size: columns of the input.
        out_starts: first column of each output in the joined product.
        out_sizes: columns of each output.
        biases: 1 for a slot whose bottleneck has a bias, [1, slots]; of LoRA [0, slots].
        known: tables that kernels derive, for all steps.
    """

    memory: Tensor
    rows: Tensor
    first: int
    ranks: Tensor
    in_size: int
    out_starts: tuple[int, ...]
    out_sizes: tuple[int, ...]
    biases: Tensor
    tokens: TokenSpans
    known: dict[str, Any]


class BlockTable(Protocol):
    """The pages of a sequence in the KV cache; `replaced` counts replacements of pages.

    Attributes:
        slot: the slot of the sequence's recurrent states; -1 without any.
        snapshots: numbers of tokens after which the step keeps the states, and their slots.
    """

    pages: list[int]
    replaced: int
    slot: int
    snapshots: Sequence[tuple[int, int]]

    @property
    def run_row(self) -> int:
        """The cache's row of the first token if the pages are contiguous, else -1."""

    @property
    def stop_row(self) -> int:
        """The end of the rows of a run, with the free pages reserved behind it."""

    def rows(self, start: int, stop: int) -> range | list[int]:
        """The cache's rows of tokens; a range if the pages are contiguous."""


class Span(NamedTuple):
    """One sequence's tokens in a batch.

    Attributes:
        start: index of its first token in the batch.
        length: tokens in the batch.
        context: tokens before them, in the KV cache.
        table: pages of the sequence in the KV cache; None without a cache.
        virtual: number of leading tokens of the adapter's prompt, which have no ids.
        origin: in training, tokens of the pass before the sequence's first, of any rank.
        number: in training, the sequence's index in the pass.
    """

    start: int
    length: int
    context: int = 0
    table: BlockTable | None = None
    virtual: int = 0
    origin: int = 0
    number: int = 0

    @property
    def tokens(self) -> slice:
        """The span's tokens in the batch."""
        return slice(self.start, self.start + self.length)


@dataclass(frozen=True, slots=True)
class DroppedPart:
    """Tokens that dropout draws random numbers for together.

    `count` tokens from `start` are in the batch; `skipped` of the part's `whole` precede them.
    """

    start: int
    count: int
    skipped: int
    whole: int
    generator: torch.Generator


class DroppedTokens(NamedTuple):
    """Tokens that a device draws the random numbers of dropout for.

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
    """Sequences with a single new token each, for which attention is a single call.

    Attributes:
        tokens: their indices in the batch, [count].
        row: first row that the first sequence attends to.
        stride: rows from one sequence's first to the next sequence's.
        longest: most rows that a sequence attends to.
        mask: [count, 1, 1, longest], added to the logits; None where lengths are equal.
        rows: [count, longest], the rows that they attend to where distances are unequal.
    """

    tokens: Tensor
    row: int
    stride: int
    longest: int
    mask: Tensor | None
    rows: Tensor | None = None


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The cache rows that single new tokens attend to, as the native kernel reads them.

    Attributes:
        numbers: [count, 4] of token, rows, first span and spans; then [spans, 2] of row and rows.
        count: number of sequences.
        address: of the numbers in memory.
    """

    numbers: NDArray[np.int64]
    count: int
    address: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "address", self.numbers.ctypes.data)


@dataclass(frozen=True)
class StepTokens:
    """The tokens of a step that may be recorded, by sequence.

    Attributes:
        ids: the tokens of all sequences, sequence by sequence.
        lengths: tokens of each sequence in the step.
        contexts: tokens of each sequence before these, in the cache.
        slots: slot of each sequence's adapter.
        read: indices of the sequences for which the last token's logits are read.
    """

    ids: Sequence[int]
    lengths: Sequence[int]
    contexts: Sequence[int]
    tables: Sequence[BlockTable]
    slots: Sequence[AdapterSlot]
    read: Sequence[int]


class KvGradients:
    """Gradients of a layer's keys and values, of all tokens of a training pass.

    Keys are those after rotary embedding, [tokens, kv_heads, head_dim], in fp32 at least. Gradients
    add up from the last window to the first; those of a window's own tokens are final after it
    (FlexLLM v2 §6.1, figure 8).
    """

    def __init__(self, keys: Tensor, values: Tensor, tokens: int) -> None:
        """Start with zeros for `tokens` keys and values of the shapes of a layer's cache."""
        self.keys, self.values = (
            rows.new_zeros(
                (tokens, rows.shape[-3], rows.shape[-1]),
                dtype=torch.promote_types(rows.dtype, torch.float32),
            )
            for rows in (keys, values)
        )


class Snapshot(NamedTuple):
    """States to keep within a batch: of a span, after so many of its tokens, in a slot."""

    span: int
    tokens: int
    slot: int


class SequenceStates:
    """The recurrent states of a batch's sequences, by layer and number of the state in the layer.

    A state is [n, …] of n sequences, in the order of the spans.

    Attributes:
        snapshots: states to keep, in order.
    """

    snapshots: Sequence[Snapshot] = ()

    def read(self, layer: int, number: int, into: Tensor) -> None:
        """Write the states before the batch's tokens into zeros; a new sequence's stay zero."""
        raise NotImplementedError

    def write(self, layer: int, number: int, states: Tensor) -> None:
        """Take the states after the batch's tokens."""
        raise NotImplementedError

    def slots_of(self, layer: int, number: int) -> tuple[Tensor, Tensor] | None:
        """Return states [slots, …] to change in place, and each sequence's slot, [n].

        None if they are no such, a sequence is new, or a snapshot is to be kept.
        """
        return None

    def keep(self, layer: int, number: int, slot: int, state: Tensor) -> None:
        """Take the state of a snapshot, [1, …]."""
        raise NotImplementedError

    def read_gradients(self, layer: int, number: int, into: Tensor) -> None:
        """Write the gradients of the states after a window's tokens into zeros."""
        raise NotImplementedError

    def write_gradients(self, layer: int, number: int, gradients: Tensor) -> None:
        """Take the gradients of the states before a window's tokens."""
        raise NotImplementedError


class Routes:
    """The experts of a batch's tokens, [T, layers, k]; the layers are those with experts.

    Attributes:
        replayed: experts that tokens have to choose, int16, -1 for the router's; None for no
            replay.
    """

    def __init__(self, layers: Sequence[int], replayed: Tensor | None = None) -> None:
        self._places = {layer: place for place, layer in enumerate(layers)}
        self.replayed = replayed
        self._chosen: dict[int, Tensor] = {}

    def chosen(self, layer: int, indices: Tensor) -> Tensor:
        """Return the experts of a layer's tokens, [T, k], by the indices that its router chose."""
        if self.replayed is not None:
            wanted = self.replayed[:, self._places[layer]].to(indices.dtype)
            indices = torch.where(wanted < 0, indices, wanted)
        self._chosen[layer] = indices
        return indices

    @property
    def recorded(self) -> Tensor:
        """The experts that tokens chose in all layers, [T, layers, k], int16."""
        return torch.stack([self._chosen[layer] for layer in self._places], 1).to(torch.int16)


class ProgramBatch(Protocol):
    """A token-flat batch, as the functions of emitted programs read it.

    Attributes:
        input_ids: [T], int64.
        spans: cover all tokens, in order.
        longer_spans: those of two or more tokens.
        uniform_length: the length of all spans if they are whole sequences of equal length, else 0.
        layer: index of the layer that runs; the runner sets it.
        ranks: the group that runs it, each rank on its part; the runner sets it.
        parts: how ranks share the tokens of sequences, and this batch has those of this
            rank; None if it has all.
        is_alone: True if no other function runs beside the batch's, with which products are joined.
        keeps: True if attention returns the log-sum-exp for backward.
        gradients: gradients of keys and values of the layer in its backward; None for whole
            sequences without a cache.
        states: recurrent states of the sequences; None for whole sequences without a cache.
        routes: the experts of the tokens, to be recorded or replayed; None for neither.
        rows: the cache's row of each token, [T]; negative for tokens not written; None
            without a cache.
        rows_of_all: the cache's row of each token of all ranks that share them; None if they share
            none, or keep no cache.
        virtual_rows: indices of the virtual tokens, [v]; None without any.
        virtual_places: index of each virtual token in its adapter's prompt, [v].
        chosen: the tokens of the epilogue; None for all.
        logits_on_first: True if only the first of several ranks gets the epilogue's logits.
        known: tables that kernels derive from the batch, for all layers.
    """

    input_ids: Tensor
    spans: Sequence[Span]
    longer_spans: Sequence[Span]
    uniform_length: int
    layer: int
    ranks: Ranks
    parts: TokenParts | None
    is_alone: bool
    keeps: bool
    gradients: KvGradients | None
    states: SequenceStates | None
    routes: Routes | None
    rows: Tensor | None
    rows_of_all: Tensor | None
    virtual_rows: Tensor | None
    virtual_places: Tensor | None
    chosen: Tensor | None
    logits_on_first: bool
    known: dict[object, Any]

    @property
    def tokens(self) -> int:
        """T of the graph that runs: all tokens, or those of the epilogue."""

    @property
    def cached(self) -> tuple[Tensor, Tensor] | None:
        """The layer's cache: keys and values of all rows, [K, rows, D], or in pages; or None."""

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
        """Write keys and values of all ranks' tokens into the layer's cache; return `cached`."""

    def seen(self, span: Span) -> slice | Tensor:
        """The cache's rows of a sequence up to the end of its span."""

    def decode_groups(self, reach: int) -> Sequence[DecodeGroup]:
        """The spans of a single token, in groups; `reach` as of `Scoring`."""

    def decode_rows(self, reach: int) -> DecodeRows:
        """The rows of the spans of a single token; `reach` as of `Scoring`."""

    def dropped_parts(self, key: int) -> Sequence[DroppedPart]:
        """Parts that cover all tokens in order, equal for each call; none without dropout."""

    def dropped_tokens(self) -> DroppedTokens | None: ...


class TokenLimits(NamedTuple):
    """Limits of sampling for S rows, fp32, [S] each.

    Attributes:
        temperatures: above 0.
        top_k: number of the most likely tokens that a row keeps; 0 for all.
        tails: 1 - p of top-p, the probability that removed tokens may have; 0 for none.
        min_p: the least probability relative to the most likely token; 0 for none.
        is_cut: True if some row has top-k or top-p.
    """

    temperatures: Tensor
    top_k: Tensor
    tails: Tensor
    min_p: Tensor
    is_cut: bool
