"""Loss chunks: target tokens whose loss is computed together, so that not all logits exist at once.

Which tokens have a target is known on the host, so no chunk waits for the device. Where ranks hold
of the tokens, each puts as many of its own rows into a chunk as any other, so that no row moves
between ranks: after a rank's last target its rows are padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pcg.kernels.devices import uploaded
from pcg.kernels.torch.products import ProductRequest
from pcg.ranks.group import Ranks
from pcg.ranks.token_shards import shard_rows
from pcg.runtime.data.example import IGNORED
from pcg.runtime.model.batch import Batch
from pcg.runtime.model.cut_execution import CutExecution


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
        """Add this rank's part of the chunk to its rows."""
        into.index_add_(0, self.own, part[: len(self.own)].to(into.dtype))


class LossChunks:
    """The tokens of a batch that have a target, from which chunks are taken."""

    def __init__(
        self, targets: Tensor, device: torch.device, ranks: Ranks, is_sequence_parallel: bool
    ) -> None:
        """Begin before the first of them.

        Args:
            targets: [T], on the host; negative for none.
            device: where chunks are computed.
            is_sequence_parallel: True if each rank holds a part of the tokens.
        """
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
        """Number of tokens that no chunk has had."""
        return sum(map(len, self._own))

    def take(self, size: int) -> LossChunk:
        """Take the next chunk, of `size` tokens at most but at least one of each rank."""
        each = max(1, size // len(self._own))
        taken = [found[:each] for found in self._own]
        self._own = [found[each:] for found in self._own]
        if not self._held:
            (chunk,) = taken
            rows, wanted = self._sent(torch.stack([chunk, self._targets[chunk]]))
            return LossChunk(rows, wanted, rows, len(rows))
        tokens = pad_sequence(taken, batch_first=True)
        wanted = pad_sequence([self._targets[one] for one in taken], True, padding_value=IGNORED)
        mine = taken[self._ranks.rank] - self._ranks.rank * self._held
        rows, of_rows = self._sent(torch.stack([tokens.flatten(), wanted.flatten()]))
        return LossChunk(rows, of_rows, self._sent(mine), tokens.shape[1])

    def _sent(self, numbers: Tensor) -> Tensor:
        return uploaded(numbers, self._device)


@dataclass
class WindowLoss:
    """A window whose loss is computed, of one target of each token.

    Attributes:
        targets: the target of each token, [T], on the host; negative for none.
        carried: the last layer's outputs.
        shared: the prologue's outputs that the loss may read.
        weight: the weight of each token's loss; None to train nothing.
        gradients: the gradient of each carried value; none where nothing is trained.
        slopes: the weight of each token's loss, [T], on the device; None for `weight` of all.
        losses: where each token's loss is put, [T], on the device; None to keep the sum alone.
        first: the same window with the first targets of its tokens, where these are further ones;
            gradients are added to its own.
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
        """Put the losses of a chunk, if each is wanted; padded rows of ranks have a loss of 0."""
        if self.losses is not None:
            self.losses.index_add_(0, chunk.rows, losses.to(self.losses.dtype))


class ComputesLoss(Protocol):
    """A program's loss.

    Attributes:
        loss_chunk: the most tokens whose loss is computed together.
        head_rows: rows of the head, if the loss is best computed for some of them at a time: each
            chunk of tokens reads all, and on CPUs there are few tokens. 0 otherwise.
    """

    loss_chunk: int
    head_rows: int

    def loss_chunks(self, targets: Tensor) -> LossChunks:
        """Return the tokens of a window whose loss is computed."""

    def loss_tokens(self, tokens: int, left: int) -> int:
        """Return how many of `left` tokens have their loss computed at once, of up to `tokens`."""

    def loss(self, window: WindowLoss, chunk: LossChunk) -> ProductRequest[Tensor]:
        """Return the summed loss of some tokens of a window, fp64, and put their gradients."""


class PassLoss:
    """The loss of some windows, some of its work at a time.

    Attributes:
        windows: the windows, in the order of their losses; those of further targets come behind
            those of the first.
        total: the sum of the losses, fp64, on the device; complete once `left` is 0.
        left: number of tokens whose loss is left; of a chunk that is under way, in proportion. At
            least 1 before the end.
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
        # A token's numbers: the head's rows, forward and back.
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
        """Run on for so many tokens."""
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
        """Take a chunk of each window until it is enough."""
        functions = []
        for window, chunks in zip(self.windows, self._chunks, strict=True):
            if chunks.left and size > 0:
                taken = self._program.loss_tokens(size, chunks.left)
                chunk = chunks.take(taken)
                # Less than there could be is a size that has a graph: the rest comes next.
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
"""More numbers than any chunk has."""
