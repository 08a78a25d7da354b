"""The basis of recorded training functions: program, tokens and gradients in fixed memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from pcg.ir.program.program import ModelGraph, Training
from pcg.kernels.batch import DroppedTokens
from pcg.kernels.torch.products import ProductRequest
from pcg.kernels.triton.attention.work import AttentionWork
from pcg.ranks.group import SINGLE_RANK
from pcg.runtime.memory.kv_cache import KvCache
from pcg.runtime.model.batch import Batch


class RecordedProgram(Protocol):
    """The interface of `BoundTraining` for recorded functions."""

    training: Training

    def prologue(self, batch: Batch) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]: ...

    def layer(
        self, layer: int, batch: Batch, carried: Sequence[Tensor], shared: Sequence[Tensor | None]
    ) -> ProductRequest[tuple[Sequence[Tensor], Sequence[Tensor]]]: ...

    def layer_backward(
        self, layer: int, batch: Batch, saved: list[Any], gradients: list[Tensor]
    ) -> ProductRequest[list[Tensor]]: ...

    def loss_inputs(
        self, carried: Sequence[Tensor], shared: Sequence[Tensor | None]
    ) -> list[Tensor]: ...

    def loss_of(
        self, batch: Batch, part: Sequence[Tensor], targets: Tensor, slopes: Tensor
    ) -> ProductRequest[tuple[Tensor, Sequence[Tensor]]]: ...

    def loss_alone(
        self, batch: Batch, part: Sequence[Tensor], targets: Tensor
    ) -> ProductRequest[Tensor]: ...

    def trained_in(self, layer: int) -> list[Tensor]: ...

    def trained_in_loss(self) -> list[Tensor]: ...


def groups_of(model: ModelGraph) -> frozenset[int]:
    """Return the numbers of query heads per KV head in the model."""
    groups = set()
    for block in model.blocks:
        for node in block.nodes:
            if node.op == "attention":
                q, k = (block.types[name].shape[1] for name in node.inputs[:2])
                groups.add(int(q) // int(k))
    return frozenset(groups)


class RecordedTokens(Batch):
    """A fixed number of tokens in fixed memory; initially padding.

    Attributes:
        work: the work lists of attention, by query heads per KV head, and True for backward; empty
            without attention.
    """

    def __init__(self, size: int, cache: KvCache, device: torch.device) -> None:
        self.input_ids = torch.zeros(size, dtype=torch.int64, device=device)
        self.positions = torch.zeros_like(self.input_ids)
        self.rows: Tensor = torch.full_like(self.input_ids, -1)
        self._dropped = DroppedTokens(
            torch.zeros(2, dtype=torch.int64, device=device),
            self.positions,
            torch.zeros_like(self.input_ids),
        )
        self.work: dict[tuple[int, bool], AttentionWork] = {}
        self.known = {}
        self.layer = 0
        self.ranks = SINGLE_RANK
        self.dropout_seed = self.chosen = self.gradients = None
        self.virtual_rows = self.virtual_places = self.parts = self.rows_of_all = None
        self.keeps, self.is_alone = True, False
        self._cache = cache

    def dropped_tokens(self) -> DroppedTokens:
        """Return the inputs of dropout on a device; a key of 0 turns dropout off."""
        return self._dropped

    def take_dropped(self, batch: Batch, rows: Tensor) -> None:
        """Copy the dropout inputs of some tokens of a batch, [n], to the first rows."""
        dropped = batch.dropped_tokens()
        if dropped is None:
            self._dropped.key.zero_()
            return
        self._dropped.key.copy_(dropped.key)
        self._dropped.positions[: len(rows)] = dropped.positions[rows]
        self._dropped.sequences[: len(rows)] = dropped.sequences[rows]

    def take(self, batch: Batch) -> None:
        """Copy the tokens of a batch of at most this size; the remaining tokens are padding."""
        count = len(batch.input_ids)
        assert batch.rows is not None
        self.input_ids[:count] = batch.input_ids
        self.positions[:count] = batch.positions
        self.rows[:count] = batch.rows
        self.rows[count:] = -1
        dropped = batch.dropped_tokens()
        if dropped is None:
            self._dropped.key.zero_()
        else:
            self._dropped.key.copy_(dropped.key)
            self._dropped.sequences[:count] = dropped.sequences
        for (group, backward), work in self.work.items():
            built = AttentionWork.build(
                batch.spans, group, self.rows.device, backward=backward, capacity=work.capacity
            )
            work.flat.copy_(built.flat)


class OwnGradients:
    """Fixed memory for the gradients of an adapter's tensors during training."""

    def __init__(self) -> None:
        self._of: dict[int, Tensor] = {}

    def hold(self, weights: Iterable[Tensor]) -> None:
        """Move the gradients of weights into fixed memory; missing gradients become zeros."""
        fresh: list[Tensor] = []
        for weight in weights:
            gradient = self._of.get(id(weight))
            if gradient is None:
                gradient = self._of[id(weight)] = torch.zeros_like(weight)
            if weight.grad is gradient:
                continue
            if weight.grad is None:
                fresh.append(gradient)
            else:
                gradient.copy_(weight.grad)
            weight.grad = gradient
        if fresh:
            torch._foreach_zero_(fresh)

    def holds(self, weights: Iterable[Tensor]) -> bool:
        """Return True if the gradients of all weights are in fixed memory."""
        return all(w.grad is not None and w.grad is self._of.get(id(w)) for w in weights)
