"""Shards: the parts of tensors and of layers that a rank holds.

A rank's parameter describes its part of a tensor by `rows` of the whole's rows, and by the
layout `part` of these rows: of n ranks, rank r has entries r m/n … (r + 1) m/n of a partitioned dim
of size m. Where c ranks share a part, those are entries p c m/n … (p + 1) c m/n, with p the
quotient r / c. A tensor that is held as summands is whole on the first rank and zeros on others.
Of E experts rank r has r E/n … (r + 1) E/n; B of LoRA on experts has their columns, i E + e, apart.
Ranks that share experts have those of a part, and of these entries r % s m/s … of another dim.

Replicas may hold parts of layers: a layer is gathered before it runs, and dropped after. The frozen
tensors of a layer lie in a row in a flat memory of s bytes, and each of n replicas holds a part:

    c = ceil(s / (16 n)) · 16                    replica r has bytes r c to (r + 1) c
    held by a replica = Σ_layers c + 2 max c n   the parts, and two rooms for gathered layers

A message gathers a layer into a room, in the form in which it is read, while the layer before it
runs. Constants, and weights that layers share, are whole on every replica.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from pcg.errors import ParallelError
from pcg.ir.graph import Parameter
from pcg.ir.layouts import PRE_REDUCE
from pcg.ir.program.layer_order import ROOMS
from pcg.ir.types import State, is_format
from pcg.ranks.group import Ranks

Ranges = tuple[tuple[int, int], ...]
"""The first entry and the end of the part of each dim of a tensor."""


def is_sharded(parameter: Parameter) -> bool:
    """Return whether a rank holds less than the whole tensor."""
    return bool(parameter.rows or parameter.part.dim) or parameter.part == PRE_REDUCE


def ranges_of(parameter: Parameter, shape: Sequence[int], ranks: Ranks) -> Ranges:
    """Return the range that a rank holds of each dim of a whole tensor of this shape."""
    ranges = [(0, size) for size in shape]
    if parameter.rows:
        ranges[max(-2, -len(ranges))] = parameter.rows
    for dim, part in ((parameter.part.dim, part_of), (parameter.part.part, shared_part_of)):
        if dim:
            start, stop = ranges[dim]
            place, size = part(parameter, stop - start, ranks)
            ranges[dim] = (start + place, start + place + size)
    return tuple(ranges)


def part_of(parameter: Parameter, size: int, ranks: Ranks) -> tuple[int, int]:
    """Return the start and the size of a rank's part of a dim."""
    alike = parameter.copies * parameter.part.sharers
    part = size // (ranks.size // alike)
    return ranks.rank // alike * part, part


def shared_part_of(parameter: Parameter, size: int, ranks: Ranks) -> tuple[int, int]:
    """Return the start and the size of a rank's part of a dim that ranks of an expert share."""
    part = size // parameter.part.sharers
    return ranks.rank % parameter.part.sharers * part, part


def has_zeros(parameter: Parameter, ranks: Ranks) -> bool:
    """Return whether a rank holds zeros, as a summand."""
    _, _, sharers, part = parameter.part
    if sharers > 1 and not part:
        return ranks.rank % sharers > 0
    return parameter.part == PRE_REDUCE and ranks.rank > 0


def shard_of(whole: Tensor, parameter: Parameter, ranks: Ranks) -> Tensor:
    """Return a rank's shard of a tensor; a view if it is a part of it."""
    if not is_sharded(parameter):
        return whole
    if _is_apart(parameter):
        whole = part_of_experts(whole, -1, parameter, ranks)
        if not parameter.rows and not parameter.part.part:
            return whole
        parameter = replace(parameter, part=parameter.part._replace(dim=0))
    ranges = ranges_of(parameter, whole.shape, ranks)
    piece = whole[tuple(slice(*bounds) for bounds in ranges)]
    return torch.zeros_like(piece) if has_zeros(parameter, ranks) else piece


def joined_shards(shards: Sequence[Tensor], parameter: Parameter) -> Tensor:
    """Join the shards of all ranks, each part once, to the tensor of the parameter's rows."""
    _, dim, sharers, part = parameter.part
    if part:
        runs = (shards[first : first + sharers] for first in range(0, len(shards), sharers))
        shards = [torch.cat([*run], part) for run in runs]
    if not _is_apart(parameter):
        return torch.cat([*shards], dim)
    experts = parameter.experts // len(shards)
    return torch.cat([shard.unflatten(-1, (-1, experts)) for shard in shards], -1).flatten(-2)


def part_of_experts(whole: Tensor, dim: int, parameter: Parameter, ranks: Ranks) -> Tensor:
    """Return the entries i E + e of a dim that belong to a rank's experts, in a new tensor."""
    start, size = part_of(parameter, parameter.experts, ranks)
    used = whole.shape[dim] // parameter.experts * parameter.experts  # of a padded stack
    by_rank = whole.movedim(dim, -1)[..., :used].unflatten(-1, (-1, parameter.experts))
    part: Tensor = by_rank[..., start : start + size].flatten(-2).movedim(-1, dim)
    return part


def _is_apart(parameter: Parameter) -> bool:
    return parameter.part.state is State.ROUTED and parameter.part.dim == -1


Key = TypeVar("Key")
_ALIGNMENT = 16
"""The bytes that a part is a multiple of, so that no part begins within a number."""


def is_in_shards(parameter: Parameter) -> bool:
    """Return whether a layer's parameter is a frozen weight of that layer only.

    Raises:
        ParallelError: the weight is quantized.
    """
    if is_format(parameter.type.dtype):
        raise ParallelError(
            f"shard_base shards float weights, and {parameter.source} is stored as "
            f"{parameter.type.dtype}; leave shard_base out (--shard-base), or use tp"
        )
    return parameter.role == "frozen" and "{layer}" in parameter.source


def part_bytes(size_bytes: int, replicas: int) -> int:
    """Return the bytes of a replica's part of a layer of `size_bytes`."""
    return -(-size_bytes // (replicas * _ALIGNMENT)) * _ALIGNMENT


def rooms_bytes(layers: Iterable[int], replicas: int) -> int:
    """Return the bytes of the rooms for layers of these bytes."""
    return ROOMS * max((part_bytes(size, replicas) * replicas for size in layers), default=0)


@dataclass(frozen=True)
class FlatPlace:
    """The place of a tensor in a layer's flat memory, from byte `start` on."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape) * self.dtype.itemsize

    def of(self, flat: Tensor) -> Tensor:
        """Return the tensor, a view of the flat memory."""
        return flat[self.start : self.stop].view(self.dtype).view(self.shape)

    def within(self, start: int, stop: int) -> tuple[int, int]:
        """Return the first entry and the end of those in a range of bytes."""
        size = self.dtype.itemsize
        first, end = max(start, self.start), min(stop, self.stop)
        return (first - self.start) // size, max(end - self.start, 0) // size


@dataclass(frozen=True)
class LayerShard(Generic[Key]):
    """A replica's part of a layer.

    Attributes:
        memory: its bytes, [c].
        places: the places of the layer's tensors.
    """

    memory: Tensor
    places: Mapping[Key, FlatPlace]


Fill = Callable[[Key, Ranges, Tensor], None]
"""Reads a part of a tensor, as ranges of its dims, into memory."""


def read_shard(
    tensors: Mapping[Key, tuple[Sequence[int], torch.dtype]],
    replicas: Ranks,
    device: torch.device,
    fill: Fill[Key],
) -> LayerShard[Key]:
    """Read a replica's part of a layer, and no more than that of matrices.

    Args:
        tensors: the shapes and dtypes of the layer's tensors; neighbours lie side by side.
    """
    places: dict[Key, FlatPlace] = {}
    size = 0
    for key in sorted(tensors, key=lambda key: -tensors[key][1].itemsize):  # keeps the order
        shape, dtype = tensors[key]
        places[key] = FlatPlace(size, tuple(shape), dtype)
        size = places[key].stop
    part = part_bytes(size, replicas.size)
    memory = torch.zeros(part, dtype=torch.uint8, device=device)
    start = replicas.rank * part
    for key, place in places.items():
        first, end = place.within(start, start + part)
        for ranges, entry, taken in _boxes(place.shape, first, end):
            at = place.start + entry * place.dtype.itemsize - start
            shape = [b - a for a, b in ranges]
            if taken == (0, math.prod(shape)):
                fill(key, ranges, FlatPlace(at, tuple(shape), place.dtype).of(memory))
                continue
            whole = torch.empty(shape, dtype=place.dtype, device=device)
            fill(key, ranges, whole)
            some = whole.view(-1)[slice(*taken)]
            FlatPlace(at, (len(some),), place.dtype).of(memory).copy_(some)
    return LayerShard(memory, places)


def _boxes(
    shape: Sequence[int], first: int, end: int
) -> Iterator[tuple[Ranges, int, tuple[int, int]]]:
    """Cut a run of entries into boxes: ranges of the dims, each read together.

    Rows of matrices are cut, but not items of more dims, such as experts.

    Yields:
        The ranges, the first entry taken, and the first and the end of the entries
        taken of those read.
    """
    if len(shape) < 2:
        if first < end:
            yield ((first, end),), first, (0, end - first)
        return
    item = math.prod(shape[1:])
    rest = tuple((0, size) for size in shape[1:])
    while first < end:
        index, offset = divmod(first, item)
        whole = (end - first) // item
        if offset == 0 and whole:
            yield ((index, index + whole), *rest), first, (0, whole * item)
            first += whole * item
            continue
        stop = min(end - index * item, item)
        if len(shape) == 2:
            yield ((index, index + 1), (offset, stop)), first, (0, stop - offset)
        else:
            yield ((index, index + 1), *rest), first, (offset, stop)
        first += stop - offset
