"""Rows of LoRA's matrices of the adapters that run, in one memory, each adapter at its true rank.

Row k of A [r, in] and row k of scaled Bᵀ [r, out] lie contiguous wherever there is room. Segmented
kernels find them by tables of their first elements:

    rows   [matrices, slots, most_rank]   A of each output of a site, then B of each
    ranks  [matrices, slots]              0 where an adapter has nothing there

An adapter takes a slot and a run of the memory when it first runs, and gives them up when others
need them and it does not run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pcg.ir.graph import Parameter
from pcg.runtime.adapter_stack import Lora
from pcg.runtime.adapters import Adapter
from pcg.runtime.free_runs import FreeRuns
from pcg.runtime.served_weights import ServedWeights

_ALIGNMENT = 8
"""Elements that rows are a multiple of, so that kernels load 16 bytes of bf16 at once."""
_UNIT = 512
"""Elements that the memory is given out in."""
_LEAST_UNITS = 64
_LEAST_SLOTS = 16
_RANK_STEP = 16
"""Ranks of the tables are a multiple of it, as kernels take so many at once."""


@dataclass(frozen=True)
class TokenSpans:
    """Whose the tokens of a batch are.

    Attributes:
        spans: first token, tokens and slot of neighbours with one adapter.
        known: what kernels make of it, kept for all layers.
    """

    spans: tuple[tuple[int, int, int], ...]
    known: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LoraRows:
    """The LoRA of a batch's adapters at linear operators of one input.

    Attributes:
        memory: flat, of the adapters' dtype.
        a_rows: first element of each row of A, [outputs, slots, most_rank].
        b_rows: of scaled Bᵀ.
        ranks: of each output and slot, [outputs, slots].
        in_size: of the input.
        out_sizes: of the outputs, which lie one behind the other in their product.
        tokens: whose they are.
        known: what kernels make of the tables, kept for all steps.
    """

    memory: Tensor
    a_rows: Tensor
    b_rows: Tensor
    ranks: Tensor
    in_size: int
    out_sizes: tuple[int, ...]
    tokens: TokenSpans
    known: dict[str, Any]


@dataclass(frozen=True)
class LoraSite:
    """Linear operators of one input in one layer.

    Attributes:
        part: of the model: a layer, or behind the last of them prologue and epilogue.
        layer: of its parameters.
        name: attribute that emitted functions read.
        modules: A, B and size of each output.
    """

    part: int
    layer: int
    name: str
    modules: tuple[Lora, ...]

    @property
    def matrices(self) -> list[Parameter]:
        """A of each output, then B of each."""
        return [a for a, _, _ in self.modules] + [b for _, b, _ in self.modules]

    @property
    def is_aligned(self) -> bool:
        """Whether kernels can read its rows."""
        sizes = [self.in_size, *(out for *_, out in self.modules)]
        return not any(size % _ALIGNMENT for size in sizes)

    @property
    def in_size(self) -> int:
        """Of their input; how many ranks there are is left open."""
        return int(self.modules[0][0].type.shape[-1])


class LoraMemory:
    """The memory and its tables.

    Args:
        sites: in order.
        weights: of adapters.
        device: of the memory.
        dtype: of adapters.
    """

    def __init__(
        self,
        sites: Sequence[LoraSite],
        weights: ServedWeights,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._sites = tuple(sites)
        self._weights = weights
        self._device = device
        self._first: list[int] = []
        matrices = 0
        for site in self._sites:
            self._first.append(matrices)
            matrices += 2 * len(site.modules)
        self._slots: dict[int, int] = {}
        self._runs: dict[int, tuple[int, int]] = {}
        self._free_slots: list[int] = []
        self._free = FreeRuns()
        self._memory = torch.empty(0, dtype=dtype, device=device)
        self._rows = torch.zeros((matrices, 0, _RANK_STEP), dtype=torch.int64, device=device)
        self._ranks = torch.zeros((matrices, 0), dtype=torch.int32, device=device)
        self._known: list[dict[str, Any]] = [{} for _ in self._sites]

    @property
    def size_bytes(self) -> int:
        """Of the memory."""
        return self._memory.nbytes

    def slot(self, adapter: Adapter) -> int:
        """Of an adapter that was admitted."""
        return self._slots[id(adapter)]

    def admit(self, wanted: Sequence[Adapter]) -> bool:
        """Have adapters in the memory; others stay as long as nobody needs their room.

        Returns:
            Whether any came.
        """
        for adapter in wanted:
            if id(adapter) in self._slots:
                # The latest that ran goes to the end.
                self._slots[id(adapter)] = self._slots.pop(id(adapter))
        running = {id(adapter) for adapter in wanted}
        new = [adapter for adapter in wanted if id(adapter) not in self._slots]
        for adapter in new:
            self._bring(adapter, running)
        return bool(new)

    def forget(self, adapter: Adapter) -> None:
        """Free what an adapter has: it has changed or gone."""
        self._drop(id(adapter))

    def bound(self, tokens: TokenSpans) -> list[tuple[LoraSite, LoraRows]]:
        """What emitted functions read at each site."""
        found = []
        for site, first, known in zip(self._sites, self._first, self._known, strict=True):
            count = len(site.modules)
            rows = LoraRows(
                self._memory,
                self._rows[first : first + count],
                self._rows[first + count : first + 2 * count],
                self._ranks[first : first + count],
                site.in_size,
                tuple(out for *_, out in site.modules),
                tokens,
                known,
            )
            found.append((site, rows))
        return found

    # ------------------------------------------------------------------------------- an adapter

    def _bring(self, adapter: Adapter, running: set[int]) -> None:
        parts = [
            self._weights.part(adapter, parameter.source.format(layer=site.layer))
            for site in self._sites
            for parameter in site.matrices
        ]
        dtype = self._memory.dtype
        whole = [part.to(dtype).flatten() for part in parts if part is not None]
        flat = torch.cat(whole) if whole else torch.empty(0, dtype=dtype)
        units = max(-(-len(flat) // _UNIT), 1)
        slot = self._free_slot(running)
        start = self._take(units, running)
        first = start * _UNIT
        self._memory[first : first + len(flat)].copy_(flat, non_blocking=True)
        self._runs[id(adapter)], self._slots[id(adapter)] = (start, units), slot
        self._widen(max((len(part) for part in parts if part is not None), default=0))
        rows = torch.zeros(self._rows.shape[::2], dtype=torch.int64)
        ranks = torch.zeros(len(parts), dtype=torch.int32)
        for matrix, part in enumerate(parts):
            if part is not None:
                rank, size = part.shape
                rows[matrix, :rank] = first + size * torch.arange(rank)
                ranks[matrix] = rank
                first += rank * size
        self._rows[:, slot] = rows.to(self._device)
        self._ranks[:, slot] = ranks.to(self._device)

    def _drop(self, key: int) -> None:
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._free.add(*self._runs.pop(key))
            self._free_slots.append(slot)

    def _drop_idle(self, running: set[int]) -> bool:
        """Drop who ran last the longest ago; False where all run."""
        key = next((key for key in self._slots if key not in running), None)
        if key is None:
            return False
        self._drop(key)
        return True

    # ------------------------------------------------------------------------------- room

    def _free_slot(self, running: set[int]) -> int:
        if not self._free_slots and not self._drop_idle(running):
            count = self._rows.shape[1]
            more = max(count, _LEAST_SLOTS)
            self._rows = torch.nn.functional.pad(self._rows, (0, 0, 0, more))
            self._ranks = torch.nn.functional.pad(self._ranks, (0, more))
            self._free_slots += reversed(range(count, count + more))
            self._renew()
        return self._free_slots.pop()

    def _take(self, units: int, running: set[int]) -> int:
        """The first of so many units of the memory."""
        while self._free.longest < units and self._drop_idle(running):
            pass
        if self._free.longest < units:
            held = len(self._memory) // _UNIT
            more = max(held, units, _LEAST_UNITS)
            self._memory = torch.nn.functional.pad(self._memory, (0, more * _UNIT))
            self._free.add(held, more)
            self._renew()
        start = self._free.fitting(units)
        self._free.take(start, units)
        return start

    def _widen(self, rank: int) -> None:
        """Have the tables take a rank."""
        most = self._rows.shape[2]
        if rank > most:
            more = -(-rank // _RANK_STEP) * _RANK_STEP - most
            self._rows = torch.nn.functional.pad(self._rows, (0, more))
            self._renew()

    def _renew(self) -> None:
        """What kernels know is of tensors that were there before."""
        self._known = [{} for _ in self._sites]
