"""Calls of a base executor by emitted functions: pieces of a layer's graph that run there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pcg.kernels.batch import ProgramBatch
from pcg.kernels.torch.products import Product, ProductRequest
from pcg.kernels.torch.remote_weights import remote_of


@dataclass(slots=True, eq=False)
class PieceCall(Product):
    """A piece on the tokens of one function, or of several that call the same.

    Attributes:
        weight: stands for a weight of the base that holds the piece's.
        text: the piece.
        layer: the index of the layer.
        inputs: the tensors that are sent, [T, …] each.
    """

    weight: Tensor = field(kw_only=True)
    text: str = field(kw_only=True)
    layer: int = field(kw_only=True)
    inputs: Sequence[Tensor] = field(kw_only=True)

    def run(self) -> None:
        self._x = None
        inputs, self.inputs = self.inputs, ()
        self._outputs = remote_of(self.weight).piece(self.text, self.layer, inputs)

    def run_with(self, others: Sequence[PieceCall]) -> None:
        every = (self, *others)
        counts = [len(one.inputs[0]) for one in every]
        inputs = [torch.cat(parts) for parts in zip(*(one.inputs for one in every), strict=True)]
        outputs = remote_of(self.weight).piece(self.text, self.layer, inputs)
        own = zip(*(output.split(counts) for output in outputs), strict=True)
        for one, rows in zip(every, own, strict=True):
            one._x, one.inputs = None, ()
            # Each has memory of its own, which goes when it needs it no more.
            one._outputs = [row.clone() for row in rows]


def requested_piece(
    batch: ProgramBatch, text: str, weight: Tensor, *inputs: Tensor
) -> ProductRequest[Sequence[Tensor]]:
    """Request a piece of a base executor; returns its outputs.

    Args:
        text: the piece, a graph as text.
        weight: stands for a weight of that base.
        inputs: the piece's inputs, [T, …] each.
    """
    call = PieceCall(
        (batch.layer, text),
        inputs[0],
        weight=weight,
        text=text,
        layer=batch.layer,
        inputs=inputs,
    )
    return call.requested()


def base_piece(batch: ProgramBatch, text: str, weight: Tensor, *inputs: Tensor) -> Sequence[Tensor]:
    """Call a piece of a base executor at once; the arguments are those of `requested_piece`."""
    return remote_of(weight).piece(text, batch.layer, inputs)
