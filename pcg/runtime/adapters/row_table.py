"""Tables of where adapters' rows lie, each adapter at its own width.

    rows   [entries]            first element of each row of each matrix
    ranks  [matrices, slots]    rows of each matrix; 0 if an adapter has nothing there

An adapter has `width` entries for each matrix of the model, its greatest rank rounded up, one
matrix after the other from its first entry on. So the tables are as large as the ranks of all
adapters together: a wide one adds its own entries, and gives them up when it leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from pcg.kernels.batch import AdapterSlot
from pcg.kernels.devices import uploaded
from pcg.kernels.sizes import RANK_STEP
from pcg.runtime.memory.free_runs import FreeRuns

_LEAST_SLOTS = 16
_LEAST_UNITS = 64
"""Units that there is room for once any adapter has come: 3.7 MB for LoRA on all linear operators
of an 8B model, so that a few wide adapters move nothing."""


class RowTable:
    """The tables, on a device; entries are given out in units of 16 for each matrix."""

    def __init__(self, matrices: int, device: torch.device) -> None:
        self._matrices, self._device = matrices, device
        self._unit = matrices * RANK_STEP
        self._free = FreeRuns()
        self._free_numbers: list[int] = []
        self._reserved = 0
        self.rows = torch.zeros(0, dtype=torch.int64, device=device)
        self.ranks = torch.zeros((matrices, 0), dtype=torch.int32, device=device)

    def take(self, rank: int, drop: Callable[[], bool], *, grows: bool) -> AdapterSlot | None:
        """Take entries for matrices of up to `rank` rows; None if there is no room.

        Args:
            rank: the greatest rank of the adapter's matrices.
            drop: frees another adapter's entries; returns False if none can be freed.
            grows: True if the tables may grow and move.
        """
        units = width_of(rank) // RANK_STEP
        # A wide adapter does not drop many others for entries, which are few beside their rows.
        while not (self._free_numbers and (grows or self._free.longest >= units)) and drop():
            pass
        if not self._free_numbers:
            if not grows:
                return None
            self._add_numbers(max(self.ranks.shape[1], _LEAST_SLOTS))
        if self._free.longest < units:
            if not grows:
                return None
            self._add_units(max(len(self.rows) // self._unit, units, _LEAST_UNITS))
        start = self._free.fitting(units)
        self._free.take(start, units)
        return AdapterSlot(self._free_numbers.pop(), start * self._unit, units * RANK_STEP)

    def reserve(self, count: int, ranks: Iterable[int]) -> None:
        """Make room for any `count` adapters of these greatest ranks, or of 16 and less."""
        widths = sorted(map(width_of, ranks), reverse=True)[:count]
        units = sum(widths) // RANK_STEP + count - len(widths)
        self._add_numbers(max(0, count - self.ranks.shape[1]))
        self._add_units(max(0, max(units, _LEAST_UNITS) - len(self.rows) // self._unit))
        self._reserved = max(self._reserved, units)

    def _add_numbers(self, more: int) -> None:
        count = self.ranks.shape[1]
        self.ranks = torch.nn.functional.pad(self.ranks, (0, more))
        self._free_numbers += reversed(range(count, count + more))

    def _add_units(self, more: int) -> None:
        if more:
            held = len(self.rows) // self._unit
            self.rows = torch.nn.functional.pad(self.rows, (0, more * self._unit))
            self._free.add(held, more)

    def reset(self) -> None:
        """Free all entries, and leave the tables where they are."""
        self._free = FreeRuns()
        if units := len(self.rows) // self._unit:
            self._free.add(0, units)
        self._free_numbers = [*reversed(range(self.ranks.shape[1]))]

    def give_back(self, slot: AdapterSlot) -> None:
        """Free an adapter's entries."""
        self._free.add(slot.first // self._unit, slot.width // RANK_STEP)
        self._free_numbers.append(slot.number)

    def write(self, slot: AdapterSlot, rows: Tensor, ranks: Tensor) -> None:
        """Write an adapter's entries, on any thread.

        Args:
            rows: first element of each row of each matrix, [matrices, slot.width], int64.
            ranks: rows of each matrix, [matrices], int32.
        """
        stop = slot.first + self._matrices * slot.width
        self.rows[slot.first : stop] = uploaded(rows.view(-1), self._device)
        self.ranks[:, slot.number] = uploaded(ranks, self._device)

    def trim(self) -> None:
        """Halve the table of rows as long as three quarters of it are free, and not reserved."""
        held = len(self.rows) // self._unit
        kept = trimmed(self._free, held, max(_LEAST_UNITS, self._reserved))
        if kept < held:
            self.rows = self.rows[: kept * self._unit].clone()


def width_of(rank: int) -> int:
    """Return the entries of a matrix of an adapter whose greatest rank this is."""
    return max(-(-rank // RANK_STEP), 1) * RANK_STEP


def trimmed(free: FreeRuns, held: int, least: int) -> int:
    """Take from free units what a memory of `held` units gives up; returns the units it keeps.

    It is halved, down to `least` units, as long as three quarters of it are free at its end, so
    that it is not moved again whenever an adapter comes or goes.
    """
    used = next((start for start, length in free if start + length == held), held)
    kept = held
    while kept // 2 >= least and 4 * used <= kept:
        kept //= 2
    if kept < held:
        free.take_last(held - kept)
    return kept
