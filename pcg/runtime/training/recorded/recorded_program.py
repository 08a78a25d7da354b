"""The training program of a job, as far as its layers are recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from pcg.ir.program.program import ModelGraph, Training
from pcg.kernels.torch.products import ProductRequest
from pcg.runtime.model.batch import Batch


class RecordedProgram(Protocol):
    """A training program with one adapter bound, as of `BoundTraining`."""

    training: Training

    def prologue(self, batch: Batch) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
        """Run the prologue; returns the first layer's input, and what all layers read."""

    def layer(
        self, layer: int, batch: Batch, carried: Sequence[Tensor], shared: Sequence[Tensor | None]
    ) -> ProductRequest[tuple[Sequence[Tensor], Sequence[Tensor]]]:
        """Run a layer forward."""

    def layer_backward(
        self, layer: int, batch: Batch, saved: list[Any], gradients: list[Tensor]
    ) -> ProductRequest[list[Tensor]]:
        """Run a layer backward."""

    def loss_inputs(
        self, carried: Sequence[Tensor], shared: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """Return what the epilogue reads of a window's tokens."""

    def loss_of(
        self, batch: Batch, part: Sequence[Tensor], targets: Tensor, slopes: Tensor
    ) -> ProductRequest[tuple[Tensor, Sequence[Tensor]]]:
        """Return the losses of some tokens, and the gradients of their states."""

    def loss_alone(
        self, batch: Batch, part: Sequence[Tensor], targets: Tensor
    ) -> ProductRequest[Tensor]:
        """Return the losses of some tokens."""

    def trained_in(self, layer: int) -> list[Tensor]:
        """Return the tensors of a layer that are trained."""

    def trained_in_loss(self) -> list[Tensor]:
        """Return the tensors behind the layers that are trained."""


def groups_of(model: ModelGraph) -> frozenset[int]:
    """Return the numbers of heads that share a KV head."""
    found = set()
    for block in model.blocks:
        for node in block.nodes:
            if node.op == "attention":
                q, k = (block.types[name].shape[1] for name in node.inputs[:2])
                found.add(int(q) // int(k))
    return frozenset(found)
