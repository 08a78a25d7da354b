"""The KV cache: rows of keys and values, each sequence's in one run, none padded.

A layer's cache is two tensors [kv_heads, rows, head_dim]; a row holds one token. Heads come first,
so that what one head reads of a sequence lies together. A sequence owns
`capacity` consecutive rows from its admission to its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from pcg.errors import OutOfMemoryError
from pcg.ir.program import ModelGraph
from pcg.ir.types import DTYPE_BYTES, TORCH_NAMES, TensorType


def kv_types(model: ModelGraph) -> tuple[tuple[TensorType, TensorType], ...]:
    """The types of each layer's keys and values, [T, kv_heads, head_dim]."""
    by_block = []
    for block in model.blocks:
        node = next(node for node in block.nodes if node.op == "attention")
        by_block.append((block.types[node.inputs[1]], block.types[node.inputs[2]]))
    return tuple(by_block[block] for block in model.layers)


def bytes_of_row(type_: TensorType) -> int:
    """Bytes of one token of a [T, …] tensor."""
    return prod(type_.features) * DTYPE_BYTES[type_.dtype]


@dataclass(frozen=True)
class Run:
    """Consecutive rows of one sequence."""

    start: int
    capacity: int


class KvCache:
    """Rows of keys and values for every layer, given out in runs."""

    def __init__(
        self, types: Sequence[tuple[TensorType, TensorType]], rows: int, device: torch.device
    ) -> None:
        self.rows = rows
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        for pair in types:
            for store, type_ in zip((self.keys, self.values), pair, strict=True):
                dtype = getattr(torch, TORCH_NAMES[type_.dtype])
                heads, size = type_.features
                store.append(torch.zeros((heads, rows, size), dtype=dtype, device=device))
        self._free = [Run(0, rows)] if rows else []

    @property
    def free_rows(self) -> int:
        return sum(run.capacity for run in self._free)

    def free_runs_of(self, capacity: int) -> int:
        """How many runs of that many rows are free."""
        return sum(run.capacity // capacity for run in self._free)

    def allocate(self, capacity: int) -> Run:
        """Rows for one sequence, by first fit.

        Raises:
            OutOfMemoryError: no run of free rows is long enough.
        """
        for index, run in enumerate(self._free):
            if run.capacity >= capacity:
                rest = Run(run.start + capacity, run.capacity - capacity)
                self._free[index : index + 1] = [rest] if rest.capacity else []
                return Run(run.start, capacity)
        raise OutOfMemoryError(
            f"a sequence of {capacity} tokens does not fit: {self.free_rows} of {self.rows} KV "
            "cache rows are free, not all in one run; generate fewer tokens, or fewer prompts at "
            "once"
        )

    def release(self, run: Run) -> None:
        """Give rows back; neighbouring free runs join."""
        merged: list[Run] = []
        for free in sorted([*self._free, run], key=lambda r: r.start):
            if merged and merged[-1].start + merged[-1].capacity == free.start:
                merged[-1] = Run(merged[-1].start, merged[-1].capacity + free.capacity)
            else:
                merged.append(free)
        self._free = merged
