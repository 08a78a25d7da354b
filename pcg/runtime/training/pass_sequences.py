"""The sequences of a training pass, which of their tokens this rank takes, and its windows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from pcg.kernels.batch import Span
from pcg.ranks.context_parallel import Piece, TokenParts
from pcg.ranks.group import Ranks
from pcg.runtime.data.example import IGNORED
from pcg.runtime.memory.pool import PageTable
from pcg.runtime.model.batch import Batch
from pcg.runtime.training.recorded.window_graphs import WindowSlot


class HasTokens(Protocol):
    """A sequence to go through a pass, which knows what its tokens predict."""

    @property
    def ids(self) -> Sequence[int]:
        """Its tokens, without virtual ones."""


@dataclass
class Window:
    """Some tokens of a pass.

    Attributes:
        targets: the target of each token, [T], on the host.
        end: number of tokens of the pass up to its last one.
        carried: the inputs of the next layer; after the last one, of the loss.
        shared: the prologue's outputs that all layers may read.
        saved: the tensors that each layer has saved for backward, by the layer.
        gradients: gradients of the outputs of the layer whose backward comes next.
        slot: the graphs that it runs by; None if it runs eagerly.
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
    """One example: its tokens, virtual ones first, their targets, and its number for dropout."""

    ids: Sequence[int]
    targets: Sequence[int]
    origin: int
    table: PageTable | None
    number: int


class PassSequences:
    """Sequences one behind the other, of which windows are taken from the first token on.

    Ranks that share the tokens take one window each, of their own pieces.

    Attributes:
        tokens: number of tokens of all sequences, virtual ones included.
        parts: how ranks share them; None where this one takes all.
    """

    def __init__(self, virtual: int) -> None:
        """Begin without any; each will begin with so many virtual tokens."""
        self.tokens = 0
        self.parts: TokenParts | None = None
        self._virtual = virtual
        self._each: list[PassSequence] = []

    def add(
        self, ids: Sequence[int], targets: Sequence[int], table: PageTable | None, number: int
    ) -> None:
        """Add a sequence behind the others, with its pages in the cache."""
        self._each.append(PassSequence(ids, targets, self.tokens, table, number))
        self.tokens += len(ids)

    def share(self, cp: Ranks, device: torch.device) -> None:
        """Share the tokens among ranks, if there are several."""
        if cp.size > 1:
            self.parts = TokenParts([len(one.ids) for one in self._each], cp, device)

    @property
    def most_tokens(self) -> int:
        """The most tokens that a rank takes, which all of them plan for."""
        return self.tokens if self.parts is None else self.parts.rows

    @property
    def row(self) -> int:
        """Mean number of tokens of a sequence."""
        return max(self.tokens // max(len(self._each), 1), 1)

    @property
    def targets(self) -> int:
        """Number of target tokens, of those that this rank takes."""
        _, _, targets = self.window(0, self.tokens)
        return sum(target >= 0 for target in targets)

    def context(self, begin: int) -> int:
        """Return the number of tokens before one of the pass in its sequence."""
        return min(begin - one.origin for one in self._each if one.origin <= begin)

    def window(self, begin: int, end: int) -> tuple[list[Span], list[int], list[int]]:
        """Return spans, ids and targets of the tokens from one to before another."""
        spans, ids, targets = list[Span](), list[int](), list[int]()
        parts = self.parts
        is_spare = parts is not None and parts.is_spare
        for index, start, stop in self.pieces(begin, end) if parts is None else parts.own:
            one = self._each[index]
            virtual = max(min(stop, self._virtual) - start, 0)
            place = (one.table, virtual, one.origin, one.number)
            spans.append(Span(len(ids), stop - start, start, *place))
            ids += one.ids[start:stop]
            targets += [IGNORED] if is_spare else one.targets[start:stop]
        return spans, ids, targets

    def pieces(self, begin: int, end: int) -> Iterator[Piece]:
        """Yield the sequences that the tokens from one to before another are of, and which."""
        for index, one in enumerate(self._each):
            start, stop = max(begin - one.origin, 0), min(end - one.origin, len(one.ids))
            if start < stop:
                yield Piece(index, start, stop)
