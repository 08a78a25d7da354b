"""Effects of noise: n Wᵀ, or n W, computed where the client chose."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from pcg.split.client.caller import Caller
from pcg.split.messages import DTYPES
from pcg.split.pieces import LINEAR, Piece

_SLICE_BYTES = 2**24
"""Bytes of a weight that a client holds at a time."""


class Effects(ABC):
    """Computes a piece on rows that are noise alone."""

    @abstractmethod
    def of(self, piece: Piece, noise: Tensor) -> Tensor:
        """Return a piece's outputs, [rows, outs], for noise [rows, in], in its dtype."""

    def close(self) -> None:  # noqa: B027  # most have nothing to do
        """End what was opened for it."""


class EffectsAtBase(Effects):
    """A base executor computes them, and sees the noise.

    Args:
        is_own: True if the connection is closed with this.
    """

    def __init__(self, caller: Caller, is_own: bool) -> None:
        self._caller = caller
        self._is_own = is_own

    def of(self, piece: Piece, noise: Tensor) -> Tensor:
        return self._caller.product(piece, noise, serves=False)

    def close(self) -> None:
        if self._is_own:
            self._caller.close()


class EffectsHere(Effects):
    """The client computes them, by rows of the weights that it downloads and drops."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self.downloaded_bytes = 0

    def of(self, piece: Piece, noise: Tensor) -> Tensor:
        parts = []
        for name in piece.weights:
            outs, ins = self._caller.facts["pieces"][name]
            is_linear = piece.kind == LINEAR
            found = noise.new_zeros(len(noise), outs if is_linear else ins)
            step = max(1, _SLICE_BYTES // (ins * noise.element_size()))
            for begin in range(0, outs, step):
                end = min(begin + step, outs)
                wanted = [((end - begin, ins), DTYPES[self._caller.facts["dtype"]])]
                asked = {"name": name, "begin": begin + 1, "end": end}
                (stored,) = self._caller.tensors("rows", wanted, **asked)
                self.downloaded_bytes += stored.nbytes
                weight = stored.to(noise.dtype)
                if is_linear:
                    torch.mm(noise, weight.t(), out=found[:, begin:end])
                else:
                    found.addmm_(noise[:, begin:end], weight)
            parts.append(found)
        return torch.cat(parts, -1)
