"""Random weights of a base model, by tensor."""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import torch
from torch import Tensor

from pcg.formats.format import Format, Parts
from pcg.ranks.shards import Ranges
from pcg.runtime.model.weights import slices_of


class RandomWeights:
    """Random weights for measurements, as vLLM's `dummy` load format, by seed and name.

    Matrices are normal with the configuration's `initializer_range`, as in transformers before
    training; vectors are ones, and biases zeros. All ranks and all runs have equal weights.
    """

    def __init__(self, std: float = 0.02, seed: int = 0) -> None:
        self._std = std
        self._seed = seed

    def load(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        transposed: bool = False,
        device: torch.device | str = "cpu",
        ranges: Ranges | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Generate a tensor, or a part of it; see `Weights.load`."""
        if len(shape) < 2:
            whole = torch.zeros(*shape) if name.endswith("bias") else torch.ones(*shape)
        else:
            generator = torch.Generator().manual_seed(crc32(f"{self._seed} {name}".encode()))
            whole = torch.randn(*shape, generator=generator) * self._std
        part = whole if ranges is None else whole[slices_of(ranges)]
        return part.to(device, dtype).contiguous() if out is None else out.copy_(part)

    def shared(self, name: str, *place: object) -> None:
        """Return None: no tensor exists before it is loaded; see `Weights.shared`."""

    def remote(self, name: str, *place: object) -> None:
        """Return None: all tensors are local; see `Weights.remote`."""

    def quantized(
        self,
        name: str,
        shape: Sequence[int],
        format_: Format,
        transposed: bool = False,
        experts: range | None = None,
    ) -> tuple[Parts, ...]:
        """Make a matrix, or an expert's each, and quantize it; see `Weights.quantized`."""
        format_.check(shape, name)
        every = self.load(name, shape, torch.float32).view(-1, *shape[-2:])
        return tuple(map(format_.quantize, every if experts is None else every[[*experts]]))

    def identity(self) -> str:
        """Return the seed and the deviation."""
        return f"seed {self._seed}, deviation {self._std}"

    def release(self) -> None:
        """Do nothing: no file is open; see `Weights.release`."""
