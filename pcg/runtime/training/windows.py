"""Windows of a training pass: tokens of its sequences, their loss, and the order of the backward.

Sequences. The tokens of all sequences are concatenated; a window is any number of the next tokens.
If ranks share the tokens of a pass, each rank runs its own pieces as the only window.

Loss chunks. The loss of target tokens is computed in chunks, so that logits never exist for all
tokens. The host knows which tokens have a target, so that no chunk waits for the device. If ranks
hold parts of the tokens, each rank adds the same number of its own rows to a chunk, so that no row
moves between ranks. The rows of a rank without further targets are padded.

Backward. A single stage runs all windows through a layer, the last window first, before the layer
below, so that the sums of dK and dV exist for a single layer at a time. With several pipeline
stages, a stage runs a window through all of the stage's layers, sends the gradients to the stage
below, and then runs the preceding window. In a turn each stage runs a layer of a window, or waits:

    2 stages of 2 layers, 3 windows    turn     0   1   2   3   4   5   6   7
                                       last     w2  w2  w1  w1  w0  w0
                                       first            w2  w2  w1  w1  w0  w0

In both orders a layer runs later windows first: their queries add to dK and dV of earlier tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pcg.kernels.batch import Span
from pcg.kernels.devices import uploaded
from pcg.kernels.torch.products import ProductRequest
from pcg.ranks.group import Ranks
from pcg.ranks.stages import Stage, Stages
from pcg.ranks.step_parts import Piece, TokenParts, shard_rows
from pcg.runtime.data.example import IGNORED
from pcg.runtime.memory.pool import PageTable
from pcg.runtime.model.batch import Batch
from pcg.runtime.model.merged_execution import CutExecution
from pcg.runtime.training.recorded.window_graphs import WindowSlot


class HasTokens(Protocol):
    """A sequence of a pass; `ids` has no virtual tokens."""

    @property
    def ids(self) -> Sequence[int]: ...


@dataclass
class Window:
    """Consecutive tokens of a pass.

    Attributes:
        targets: the target of each token, [T], on the host; negative for none.
        end: number of tokens of the pass up to the window's end.
        carried, shared: the inputs of the next layer to run or, after the last layer, of the loss:
            outputs of the previous layer, and values that all layers read.
        saved: tensors saved for backward, by layer.
        gradients: gradients with respect to the outputs of the next layer to run backward.
        slot: the window's graphs; None if the window runs eagerly.
    """

    batch: Batch
    targets: Tensor
    end: int
    carried: Sequence[Tensor] = ()
    shared: Sequence[Tensor | None] = ()
    saved: dict[int, list[Any]] = field(default_factory=dict)
    gradients: list[Tensor] = field(default_factory=list)
    slot: WindowSlot | None = None


@dataclass(frozen=True)
class PassSequence:
    """A sequence: ids and targets, virtual tokens first; pages; index, for dropout.

    `routes` are experts that tokens have to choose, [ids, layers, k]; None for the routers' choice.
    """

    ids: Sequence[int]
    targets: Sequence[int]
    table: PageTable | None
    number: int
    routes: Tensor | None = None


class PassSequences:
    """Concatenated sequences, to be cut into windows.

    Attributes:
        parts: the division of tokens among ranks; None if this rank has all tokens.
    """

    def __init__(
        self, sequences: Sequence[PassSequence], virtual: int, cp: Ranks, device: torch.device
    ) -> None:
        """Concatenate sequences, each with `virtual` tokens first, and divide them among ranks."""
        self._virtual = virtual
        self._sequences = sequences
        lengths = [len(sequence.ids) for sequence in sequences]
        self._origins = [0, *accumulate(lengths)][:-1]
        self.tokens = sum(lengths)
        self.parts = TokenParts(lengths, cp, device) if cp.size > 1 else None

    @property
    def most_tokens(self) -> int:
        """The largest number of tokens on a rank; all ranks plan memory for this number."""
        return self.tokens if self.parts is None else self.parts.rows

    @property
    def row(self) -> int:
        """Mean number of tokens of a sequence, at least 1."""
        return max(self.tokens // max(len(self._sequences), 1), 1)

    @property
    def targets(self) -> int:
        """Number of target tokens of this rank."""
        _, _, targets = self.window(0, self.tokens)
        return sum(target >= 0 for target in targets)

    def length_of(self, number: int) -> int:
        """Return the number of tokens of a sequence by its number, without virtual tokens."""
        lengths = (len(s.ids) for s in self._sequences if s.number == number)
        return next(lengths) - self._virtual

    def context(self, begin: int) -> int:
        """Return the position of the pass's token `begin` in its sequence."""
        return begin - max(origin for origin in self._origins if origin <= begin)

    def window(self, begin: int, end: int) -> tuple[list[Span], list[int], list[int]]:
        """Return spans, ids and targets of tokens [begin, end); with `parts`, of this rank's."""
        spans, ids, targets = list[Span](), list[int](), list[int]()
        parts = self.parts
        is_spare = parts is not None and parts.is_spare
        for index, start, stop in self.pieces(begin, end) if parts is None else parts.pieces:
            sequence = self._sequences[index]
            virtual = max(min(stop, self._virtual) - start, 0)
            place = (sequence.table, virtual, self._origins[index], sequence.number)
            spans.append(Span(len(ids), stop - start, start, *place))
            ids += sequence.ids[start:stop]
            targets += [IGNORED] if is_spare else sequence.targets[start:stop]
        return spans, ids, targets

    def routes(self, begin: int, end: int) -> Tensor | None:
        """Return the experts that the tokens of `window` have to choose; -1 for the routers'."""
        every = next((s.routes for s in self._sequences if s.routes is not None), None)
        if every is None:
            return None
        pieces = self.pieces(begin, end) if self.parts is None else self.parts.pieces
        return torch.cat(
            [
                every.new_full((stop - start, *every.shape[1:]), -1) if routes is None
                else routes[start:stop]
                for index, start, stop in pieces
                for routes in [self._sequences[index].routes]
            ]
        )  # fmt: skip

    def pieces(self, begin: int, end: int) -> Iterator[Piece]:
        """Yield the pieces of sequences in the tokens [begin, end)."""
        for index, (origin, sequence) in enumerate(
            zip(self._origins, self._sequences, strict=True)
        ):
            start, stop = max(begin - origin, 0), min(end - origin, len(sequence.ids))
            if start < stop:
                yield Piece(index, start, stop)


@dataclass(frozen=True)
class LossChunk:
    """Target tokens of a batch.

    Attributes:
        rows: indices of the tokens, [tokens], in order of rank if ranks hold parts; with padding.
        own_rows: the indices of this rank's rows into this rank's tokens, without padding.
        count: number of this rank's rows, with padding; all rows if each rank holds all tokens.
    """

    rows: Tensor
    targets: Tensor
    own_rows: Tensor
    count: int

    def of_whole(self, x: Tensor) -> Tensor:
        """Return the chunk of a tensor of all tokens, which each rank holds: [tokens, …]."""
        return x[self.rows]

    def of_own(self, x: Tensor) -> Tensor:
        """Return the chunk's rows of this rank's tensor: [count, …]; padding is zero."""
        if len(self.own_rows) == self.count:
            return x[self.own_rows]
        part = x.new_zeros(self.count, *x.shape[1:])
        part[: len(self.own_rows)] = x[self.own_rows]
        return part

    def put_own(self, part: Tensor, into: Tensor) -> None:
        into.index_add_(0, self.own_rows, part[: len(self.own_rows)].to(into.dtype))


class LossChunks:
    """The target tokens of a batch, to be cut into chunks."""

    def __init__(
        self, targets: Tensor, device: torch.device, ranks: Ranks, is_sequence_parallel: bool
    ) -> None:
        # With sequence parallelism, each rank holds a part of the tokens.
        rows = torch.nonzero(targets >= 0).squeeze(-1)
        self._targets = targets
        self._device = device
        self._ranks = ranks
        self._held = shard_rows(len(targets), ranks.size) if is_sequence_parallel else 0
        self._own = [rows]
        if self._held:
            self._own = [rows[rows // self._held == rank] for rank in range(ranks.size)]

    @property
    def left(self) -> int:
        return sum(map(len, self._own))

    def take(self, size: int) -> LossChunk:
        """Remove and return the next chunk: up to max(1, size // parts) tokens of each part."""
        each = max(1, size // len(self._own))
        taken = [rows_left[:each] for rows_left in self._own]
        self._own = [rows_left[each:] for rows_left in self._own]
        if not self._held:
            (chunk,) = taken
            rows, wanted = uploaded(torch.stack([chunk, self._targets[chunk]]), self._device)
            return LossChunk(rows, wanted, rows, len(rows))
        tokens = pad_sequence(taken, batch_first=True)
        wanted = pad_sequence([self._targets[x] for x in taken], True, padding_value=IGNORED)
        mine = taken[self._ranks.rank] - self._ranks.rank * self._held
        rows, of_rows = uploaded(torch.stack([tokens.flatten(), wanted.flatten()]), self._device)
        return LossChunk(rows, of_rows, uploaded(mine, self._device), tokens.shape[1])


@dataclass
class WindowLoss:
    """A window for the loss, with a target for each token.

    Attributes:
        targets: the target of each token, [T], on the host; negative for none.
        weight: the factor of all losses in the gradients; None for no gradients.
        gradients: the gradient of each carried value; empty without gradients.
        slopes: a factor for each token, [T], on the device, instead of `weight`; or None.
        losses: output for each token's loss, [T], on the device; None to compute only the sum.
        first: for second and further targets of the tokens, the window with the first targets, to
            whose gradients this window adds its own; None otherwise.
    """

    batch: Batch
    targets: Tensor
    carried: Sequence[Tensor]
    shared: Sequence[Tensor | None]
    weight: float | None
    gradients: list[Tensor] = field(default_factory=list)
    slopes: Tensor | None = None
    losses: Tensor | None = None
    first: WindowLoss | None = None

    def put(self, chunk: LossChunk, losses: Tensor) -> None:
        if self.losses is not None:
            self.losses.index_add_(0, chunk.rows, losses.to(self.losses.dtype))


class ComputesLoss(Protocol):
    """The interface of a program's loss; see `BoundTraining`."""

    loss_chunk: int
    head_rows: int

    def loss_chunks(self, targets: Tensor) -> LossChunks: ...

    def loss_tokens(self, tokens: int, left: int) -> int: ...

    def loss(self, window: WindowLoss, chunk: LossChunk) -> ProductRequest[Tensor]: ...


class PassLoss:
    """The loss of windows, computed in pieces.

    Attributes:
        windows: the windows in order of computation; windows of further targets follow windows of
            first targets.
        total: the sum of the unweighted losses, fp64, on the device; complete once `left` is 0.
        left: remaining target tokens, at least 1 before the end; a started chunk counts in part.
    """

    def __init__(self, program: ComputesLoss, windows: Sequence[WindowLoss]) -> None:
        self.windows = windows
        self._program = program
        self._chunks = [program.loss_chunks(window.targets) for window in windows]
        for window in windows:
            if window.first is not None:
                window.gradients = window.first.gradients
            elif window.weight is not None:
                window.gradients = [torch.zeros_like(x) for x in window.carried]
        # Work per token: the head's rows, forward and backward.
        self._each = program.head_rows * (1 if windows[0].weight is None else 2)
        self._running: CutExecution[Tensor] | None = None
        self._numbers = 0
        self._totals: list[Tensor] = []
        self.left = max(1, self._waiting)

    @property
    def total(self) -> Tensor:
        return torch.stack(self._totals).sum() if self._totals else torch.zeros((), dtype=_WIDE)

    @property
    def _waiting(self) -> int:
        return sum(chunks.left for chunks in self._chunks)

    def run(self, tokens: int) -> None:
        """Compute the loss of about `tokens` target tokens."""
        while tokens > 0 and self.left:
            if self._running is None:
                most = self._program.loss_chunk
                self._begin(most if self._each else min(tokens, most))
            before = self.left
            self._run_chunk(tokens)
            if self._running is not None:
                return
            tokens -= max(before - self.left, 1)

    def _begin(self, size: int) -> None:
        """Start a chunk of up to `size` tokens, collected from the windows in order."""
        functions = []
        for window, chunks in zip(self.windows, self._chunks, strict=True):
            if chunks.left and size > 0:
                taken = self._program.loss_tokens(size, chunks.left)
                chunk = chunks.take(taken)
                # A `taken` below both is the size of a recorded graph: the chunk ends here.
                size -= len(chunk.rows) if taken >= min(size, chunks.left) else size
                self._numbers += len(chunk.rows) * self._each
                functions.append(self._program.loss(window, chunk))
        self._running = CutExecution(functions)

    def _run_chunk(self, tokens: int) -> None:
        assert self._running is not None
        self._numbers -= self._running.run(tokens * self._each if self._each else _ALL)
        in_chunk = max(1, -(-self._numbers // self._each)) if self._each else 0
        if self._running.is_done:
            self._totals += self._running.results
            self._running, self._numbers, in_chunk = None, 0, 0
        self.left = self._waiting + in_chunk


_WIDE = torch.float64
_ALL = 2**62
"""More work than any chunk has."""


class Turn(NamedTuple):
    """The backward of a window through a layer."""

    layer: int
    window: int


def layers_back(stages: Stages, first: int) -> list[range]:
    """Return the layers from `first` on, by stage, the last stage first; omit empty stages."""
    of_stages = (stages[index].layers for index in reversed(range(stages.count)))
    layers = (range(max(x.start, first), x.stop) for x in of_stages)
    return [layer for layer in layers if layer]


class BackwardOrder:
    """The turns of a backward, equal on all stages. The caller increments `number` after a turn."""

    def __init__(self, stages: Stages, stage: Stage, first: int, windows: int) -> None:
        """Create the order before the first turn; `first` is the first layer with a backward."""
        self._depth = stage.count - 1 - stage.index
        self._layers = layers_back(stages, first)
        self._starts = [stages[index].layers.start for index in reversed(range(stages.count))]
        of_stages = self._of_one if stage.count == 1 else self._of_stages
        self._turns = [turns for turns in of_stages(windows) if any(turns)]
        self.number = 0

    def _of_one(self, windows: int) -> Iterator[list[Turn | None]]:
        for layers in self._layers:
            for layer in reversed(layers):
                for window in reversed(range(windows)):
                    yield [Turn(layer, window)]

    def _of_stages(self, windows: int) -> Iterator[list[Turn | None]]:
        """Yield the simultaneous turns of all stages, the last stage first."""
        for run in range(windows + len(self._layers) - 1):
            for passed in range(max(map(len, self._layers), default=0)):
                yield [
                    Turn(layers[-1 - passed], windows - 1 - run + depth)
                    if 0 <= run - depth < windows and passed < len(layers)
                    else None
                    for depth, layers in enumerate(self._layers)
                ]

    @property
    def is_over(self) -> bool:
        return self.number == len(self._turns)

    @property
    def turn(self) -> Turn | None:
        """The stage's next layer and window; None if the stage waits."""
        return self._turn(self._depth)

    @property
    def is_sent(self) -> bool:
        """True if the stage sends the gradients of the next turn to the stage below."""
        return self._leaves(self._depth)

    @property
    def arriving(self) -> int | None:
        """The window whose gradients arrive from the stage above at the end of the next turn."""
        above = self._turn(self._depth - 1)
        return above.window if above is not None and self._leaves(self._depth - 1) else None

    @property
    def under_way(self) -> list[int]:
        """The windows that the stages run in the next turn."""
        return [turn.window for turn in self._turns[self.number] if turn is not None]

    @property
    def left(self) -> int:
        """Number of layers from a stage's first to its next layer, inclusive; stages' maximum."""
        turns = zip(self._turns[self.number], self._starts, strict=False)
        return max(turn.layer - start + 1 for turn, start in turns if turn is not None)

    @property
    def ends_window(self) -> bool:
        """True if the next turn completes the backward of a window."""
        below = self._turn(len(self._layers) - 1)
        return below is not None and below.layer == self._layers[-1].start

    def _turn(self, depth: int) -> Turn | None:
        """Return the next turn of a stage by its distance from the last stage."""
        is_there = 0 <= depth < len(self._layers) and not self.is_over
        return self._turns[self.number][depth] if is_there else None

    def _leaves(self, depth: int) -> bool:
        """Return True if a window leaves a stage with its next turn."""
        turn = self._turn(depth)
        is_above = depth < len(self._layers) - 1
        return is_above and turn is not None and turn.layer == self._layers[depth].start
