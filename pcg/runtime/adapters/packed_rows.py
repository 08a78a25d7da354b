"""Packed rows: an adapter's matrices as rows in an image, and tables of the rows' addresses.

    rows   [entries]            first element of each row of each matrix
    ranks  [matrices, slots]    rows of each matrix; 0 for a missing matrix

An adapter has `width` consecutive entries for each matrix of the model, with `width` its maximum
rank, rounded up. The size of the tables is proportional to the sum of widths of all adapters.

Each row k of A [r, in] and of scaled Bᵀ [r, out] is contiguous in an image in host memory, in the
serving dtype and, with a GPU, in pinned memory. An adapter is packed once, when it is added to an
engine or first runs, so that copying it to the device takes a single copy for each run of its
pages. A row that does not fit into the rest of a page starts at the next page. Over ranks, the rows
are the rows of the rank's shards (`WeightStacker.part`).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from pcg.errors import UnsupportedError
from pcg.ir.graph import Parameter
from pcg.kernels.batch import AdapterSlot
from pcg.kernels.devices import uploaded
from pcg.kernels.sizes import RANK_STEP, ROW_ALIGNMENT
from pcg.peft.adapter import Adapter
from pcg.runtime.adapters.sites import JoinedSite
from pcg.runtime.adapters.stacked_weights import WeightStacker
from pcg.runtime.memory.free_runs import FreeRuns

_LEAST_SLOTS = 16
_LEAST_UNITS = 64
"""Minimum capacity in units after the first adapter: 3.7 MB for LoRA on all linear operators of an
8B model, so that a few wide adapters do not move the tables."""


class RowTable:
    """The tables on a device; entries are allocated in units of 16 for each matrix."""

    def __init__(self, matrices: int, device: torch.device) -> None:
        self._matrices, self._device = matrices, device
        self._unit = matrices * RANK_STEP
        self._free = FreeRuns()
        self._free_numbers: list[int] = []
        self._reserved = 0
        self.rows = torch.zeros(0, dtype=torch.int64, device=device)
        self.ranks = torch.zeros((matrices, 0), dtype=torch.int32, device=device)

    def take(self, rank: int, drop: Callable[[], bool], *, grows: bool) -> AdapterSlot | None:
        """Allocate entries for matrices of up to `rank` rows; return None without room.

        Args:
            rank: the maximum rank of the adapter's matrices.
            drop: frees another adapter's entries; returns False if none can be freed.
            grows: True if the tables may grow and move.
        """
        units = width_of(rank) // RANK_STEP
        # Do not drop many adapters for a wide adapter's entries, which are small beside its rows.
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
        """Reserve entries for `count` adapters of these maximum ranks, or of ranks up to 16."""
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
        """Free all entries, without moving the tables."""
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
        """Halve the table of rows while three quarters of it are free and not reserved."""
        held = len(self.rows) // self._unit
        kept = trimmed(self._free, held, max(_LEAST_UNITS, self._reserved))
        if kept < held:
            self.rows = self.rows[: kept * self._unit].clone()


def width_of(rank: int) -> int:
    """Return the number of entries per matrix for an adapter's maximum rank."""
    return max(-(-rank // RANK_STEP), 1) * RANK_STEP


def trimmed(free: FreeRuns, held: int, least: int) -> int:
    """Remove released units from the free units of a memory; return the number of kept units.

    The memory is halved, down to `least` units, while its last three quarters are free, so that
    single adapters rarely move the memory.
    """
    used = next((start for start, length in free if start + length == held), held)
    kept = held
    while kept // 2 >= least and 4 * used <= kept:
        kept //= 2
    if kept < held:
        free.take_last(held - kept)
    return kept


_LOG = logging.getLogger("pcg.adapters")
NO_PAGES = sys.maxsize
"""The page size of contiguous memory without pages."""


@dataclass(frozen=True)
class RowLayout:
    """The layout of an adapter's rows in its image.

    Attributes:
        starts: first element of each row of each matrix, [matrices, width], int64; 0 beyond a
            matrix's rows.
        ranks: rows of each matrix, [matrices], int32; 0 for a missing matrix.
        rank: the maximum number of rows; `width` is the next multiple of RANK_STEP.
        used: elements of all rows.
        elements: elements of the image, in whole pages.
    """

    starts: Tensor
    ranks: Tensor
    rank: int
    used: int
    elements: int


class RowPacker:
    """Packs adapters for the sites of a program, for pages of a fixed size.

    Cached layouts and images are dropped with the adapter, or by `forget`.
    """

    def __init__(
        self,
        sites: Sequence[JoinedSite],
        stacker: WeightStacker,
        dtype: torch.dtype,
        page_size: int = NO_PAGES,
    ) -> None:
        """Create an empty packer; `page_size` is in elements of `dtype`."""
        self.page_size = page_size
        self._stacker = stacker
        self._dtype = dtype
        self._matrices = [
            _Matrix(*_path_of(parameter, site.layer), parameter, site.layer, size)
            for site in sites
            for parameter, size in zip_longest(site.matrices, site.row_sizes)
        ]
        self._layouts: WeakKeyDictionary[Adapter, RowLayout] = WeakKeyDictionary()
        self._images: WeakKeyDictionary[Adapter, Tensor] = WeakKeyDictionary()

    def rank(self, adapter: Adapter) -> int:
        """Return the number of rows of an adapter's largest matrix; 0 without matrices."""
        known = self._layouts.get(adapter)
        if known is not None:
            return known.rank
        return max((rows for rows, _ in self._shapes(adapter)), default=0)

    def pages(self, adapter: Adapter) -> int:
        return self.layout(adapter).elements // self.page_size

    def layout(self, adapter: Adapter) -> RowLayout:
        """Return the layout of an adapter. UnsupportedError: a row is longer than a page."""
        layout = self._layouts.get(adapter)
        if layout is None:
            layout = self._layouts[adapter] = self._laid_out(adapter)
        return layout

    @torch.inference_mode(False)
    @torch.no_grad()
    def image(self, adapter: Adapter) -> Tensor:
        """Return an adapter's rows, [elements]; on any thread."""
        image = self._images.get(adapter)
        if image is None:
            image = self._images[adapter] = self._packed(adapter)
        return image

    def carry(self, adapter: Adapter, after: Adapter) -> None:
        """Keep the cached data for another version of the same tensors."""
        layout, image = self._layouts.pop(adapter, None), self._images.pop(adapter, None)
        if layout is not None:
            self._layouts[after] = layout
        if image is not None:
            self._images[after] = image

    def forget(self, adapter: Adapter) -> None:
        """Drop the cached data of an adapter with changed tensors; no copy may be running."""
        self._layouts.pop(adapter, None)
        self._images.pop(adapter, None)

    def _shapes(self, adapter: Adapter) -> list[tuple[int, int]]:
        """Return the rows, and elements per row, of each matrix; 0 rows for a missing matrix."""
        shapes = []
        for matrix in self._matrices:
            weights = adapter.weights.get(matrix.module)
            if weights is None or matrix.kind not in weights.served:
                shapes.append((0, 0))
                continue
            inner = self._stacker.inner_size(weights.inner_size, matrix.parameter)
            if matrix.size is None:  # a single row, padded to the width of a kernel's load
                shapes.append((1, -(-inner // ROW_ALIGNMENT) * ROW_ALIGNMENT))
            else:
                shapes.append((inner, matrix.size))
        return shapes

    def _laid_out(self, adapter: Adapter) -> RowLayout:
        shapes = self._shapes(adapter)
        rank = max((rows for rows, _ in shapes), default=0)
        starts: list[list[int]] = [[] for _ in shapes]
        end = 0
        for i, _, count, start in _runs(shapes, self.page_size):
            size = shapes[i][1]
            end = start + count * size
            starts[i] += range(start, end, size)
        for of_matrix in starts:
            of_matrix += [0] * (width_of(rank) - len(of_matrix))
        elements = end if self.page_size == NO_PAGES else -(-end // self.page_size) * self.page_size
        ranks = torch.tensor([rows for rows, _ in shapes], dtype=torch.int32)
        used = sum(rows * size for rows, size in shapes)
        return RowLayout(torch.tensor(starts, dtype=torch.int64), ranks, rank, used, elements)

    def _packed(self, adapter: Adapter) -> Tensor:
        image = self._memory(self.layout(adapter).elements, adapter)
        parts: dict[int, Tensor] = {}
        shapes = self._shapes(adapter)
        for i, row, count, start in _runs(shapes, self.page_size):
            if not row:  # the first run of a matrix: create the matrix once
                matrix = self._matrices[i]
                part = self._stacker.part(adapter, matrix.parameter, matrix.layer)
                assert part is not None
                parts = {i: part}
            rows = image[start : start + count * shapes[i][1]].view(count, -1)
            rows[:, : parts[i].shape[1]].copy_(parts[i][row : row + count])
        return image

    def _memory(self, elements: int, adapter: Adapter) -> Tensor:
        if self._stacker.device.type == "cuda":
            try:
                return torch.zeros(elements, dtype=self._dtype, pin_memory=True)
            except RuntimeError as error:
                _LOG.warning(
                    "no %.1f MiB of pinned memory for adapter %r (%s), which steps therefore wait "
                    "for whenever it comes; have fewer adapters, or more host memory",
                    elements * self._dtype.itemsize / 2**20,
                    adapter.name,
                    str(error).partition("\n")[0],
                )
        return torch.zeros(elements, dtype=self._dtype)


@dataclass(frozen=True)
class _Matrix:
    """A matrix of the tables: its place in the adapter, and the elements of a row.

    Attributes:
        size: elements of a row; None for a bottleneck's bias, a single row of the inner size.
    """

    module: str
    kind: str
    parameter: Parameter
    layer: int
    size: int | None


def _path_of(parameter: Parameter, layer: int) -> tuple[str, str]:
    module, _, kind = parameter.source.format(layer=layer).rpartition(".")
    return module, kind


def _runs(shapes: Sequence[Sequence[int]], page_size: int) -> Iterator[tuple[int, int, int, int]]:
    page, offset = 0, 0
    for i, (rows, size) in enumerate(shapes):
        if size > page_size and rows:
            raise UnsupportedError(
                f"an adapter's row of {size} elements is longer than a page of the KV cache, "
                f"{page_size}; compile with backend='torch'"
            )
        row = 0
        while row < rows:
            count = min(rows - row, (page_size - offset) // size)
            if not count:
                page, offset = page + 1, 0
                continue
            yield i, row, count, page * page_size + offset
            row, offset = row + count, offset + count * size
