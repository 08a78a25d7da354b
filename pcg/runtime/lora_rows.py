"""Rows of LoRA's matrices of the adapters that run, in one memory, each adapter at its true rank.

Row k of A [r, in] and row k of scaled Bᵀ [r, out] lie contiguous wherever there is room. Segmented
kernels find them by tables of their first elements:

    rows   [matrices, slots, most_rank]   A of each output of a site, then B of each
    ranks  [matrices, slots]              0 where an adapter has nothing there

An adapter takes a slot of the tables and room for its rows when it first runs, and gives them up
when others need them and it does not run (`pcg/runtime/row_room.py`).
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
from pcg.runtime.row_room import RowRoom
from pcg.runtime.served_weights import ServedWeights

_ALIGNMENT = 8
"""Elements that rows are a multiple of, so that kernels load 16 bytes of bf16 at once."""
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
    """The adapters that run, and tables of where their rows lie.

    Args:
        sites: in order.
        weights: of adapters.
        device: of the tables.
        room: for the rows.
    """

    def __init__(
        self,
        sites: Sequence[LoraSite],
        weights: ServedWeights,
        device: torch.device,
        room: RowRoom,
    ) -> None:
        self.sites = tuple(sites)
        self._weights = weights
        self._device = device
        self._room = room
        self._first: list[int] = []
        matrices = 0
        for site in self.sites:
            self._first.append(matrices)
            matrices += 2 * len(site.modules)
        self._slots: dict[int, int] = {}
        self._free_slots: list[int] = []
        self._rows = torch.zeros((matrices, 0, _RANK_STEP), dtype=torch.int64, device=device)
        self._ranks = torch.zeros((matrices, 0), dtype=torch.int32, device=device)
        self._known: list[dict[str, Any]] = []
        self._known_of: tuple[int, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Of the memory."""
        return self._room.memory.nbytes

    @property
    def element_bytes(self) -> int:
        """Of the adapters' dtype."""
        return self._room.memory.itemsize

    def slot(self, adapter: Adapter) -> int:
        """Of an adapter that was admitted."""
        return self._slots[id(adapter)]

    def admit(self, wanted: Sequence[Adapter]) -> bool:
        """Have adapters in the memory; others stay as long as nobody needs their room.

        Returns:
            Whether any came.
        """
        new = []
        for adapter in wanted:
            if id(adapter) in self._slots and self._room.holds(adapter):
                # The latest that ran goes to the end.
                self._slots[id(adapter)] = self._slots.pop(id(adapter))
            else:
                self._drop(id(adapter))
                new.append(adapter)
        running = {id(adapter) for adapter in wanted}
        for adapter in new:
            self._bring(adapter, running)
        return bool(new)

    def forget(self, adapter: Adapter) -> None:
        """Free what an adapter has: it has changed or gone."""
        self._drop(id(adapter))

    def bound(self, tokens: TokenSpans) -> list[tuple[LoraSite, LoraRows]]:
        """What emitted functions read at each site."""
        memory = self._room.memory
        addresses = (memory.data_ptr(), self._rows.data_ptr(), self._ranks.data_ptr())
        if addresses != self._known_of:
            # What kernels know is of tensors that were there before.
            self._known_of, self._known = addresses, [{} for _ in self.sites]
        found = []
        for site, first, known in zip(self.sites, self._first, self._known, strict=True):
            count = len(site.modules)
            rows = LoraRows(
                memory,
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
            for site in self.sites
            for parameter in site.matrices
        ]
        slot = self._free_slot(running)
        matrices = [part for part in parts if part is not None]
        firsts = iter(self._room.put(adapter, matrices, lambda: self._drop_idle(running)))
        self._slots[id(adapter)] = slot
        self._widen(max(map(len, matrices), default=0))
        rows = torch.zeros(self._rows.shape[::2], dtype=torch.int64)
        ranks = torch.zeros(len(parts), dtype=torch.int32)
        for matrix, part in enumerate(parts):
            if part is not None:
                rows[matrix, : len(part)] = next(firsts)
                ranks[matrix] = len(part)
        self._rows[:, slot] = rows.to(self._device)
        self._ranks[:, slot] = ranks.to(self._device)

    def _drop(self, key: int) -> None:
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._room.drop(key)
            self._free_slots.append(slot)

    def _drop_idle(self, running: set[int]) -> bool:
        """Drop who ran last the longest ago; False where all run."""
        key = next((key for key in self._slots if key not in running), None)
        if key is None:
            return False
        self._drop(key)
        return True

    def _free_slot(self, running: set[int]) -> int:
        if not self._free_slots and not self._drop_idle(running):
            count = self._rows.shape[1]
            more = max(count, _LEAST_SLOTS)
            self._rows = torch.nn.functional.pad(self._rows, (0, 0, 0, more))
            self._ranks = torch.nn.functional.pad(self._ranks, (0, more))
            self._free_slots += reversed(range(count, count + more))
        return self._free_slots.pop()

    def _widen(self, rank: int) -> None:
        """Have the tables take a rank."""
        most = self._rows.shape[2]
        if rank > most:
            more = -(-rank // _RANK_STEP) * _RANK_STEP - most
            self._rows = torch.nn.functional.pad(self._rows, (0, more))


def row_shapes(adapter: Adapter, sites: Sequence[LoraSite]) -> list[tuple[int, int]]:
    """Rows of an adapter's matrices at some sites, and their elements, in the order of tables."""
    shapes = []
    for site in sites:
        for parameter in site.matrices:
            module, _, kind = parameter.source.format(layer=site.layer).rpartition(".")
            weights = adapter.weights.get(module)
            if weights is not None and kind in weights.served:
                is_a = any(parameter is a for a, _, _ in site.modules)
                out = next((size for _, b, size in site.modules if b is parameter), 0)
                shapes.append((weights.rank, site.in_size if is_a else out))
    return shapes
