"""Random weights of a base model, for measurements: vLLM's `dummy` load format.

Matrices are normal with the configuration's `initializer_range`, as before transformers' training;
vectors are ones, and biases zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import torch
from torch import Tensor

from pcg.parallel.ranks.shards import Ranges


class RandomWeights:
    """Makes each tensor from the seed and its name, alike on every rank and in every run.

    Args:
        std: standard deviation of matrices.
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
    ) -> Tensor:
        """Make a tensor, or a part of it; see `Weights.load`."""
        if len(shape) < 2:
            whole = torch.zeros(*shape) if name.endswith("bias") else torch.ones(*shape)
        else:
            generator = torch.Generator().manual_seed(crc32(f"{self._seed} {name}".encode()))
            whole = torch.randn(*shape, generator=generator) * self._std
        part = whole if ranges is None else whole[tuple(slice(*bounds) for bounds in ranges)]
        return part.to(device, dtype).contiguous()
