"""The tokens of a step by adapter, as the segmented kernels read them.

Tokens are sorted by their adapters' slots, stably, so a slot's tokens are a segment of consecutive
places; those without an adapter have no place. A segment is cut into tiles of at most `block`
places: one program of a kernel takes one tile, and so reads one adapter (SGMV: Punica §4).

    order    [places]         the token at each place
    segments [segments, 3]    slot, first place, places
    tiles    [tiles, 3]       the same of each tile

All lie in one int32 tensor on the CPU, so a step copies once. Sizes can be given as `TileCapacity`:
then one captured CUDA graph serves every step of that many tokens, whatever their adapters. The
rest of a capacity is empty: places that nothing reads, segments and tiles of no places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from pcg.errors import CodegenError
from pcg.kernels.uploads import uploaded

DECODE_BLOCK = 16
"""Places of a tile where segments have few tokens: the least that a tensor core's product takes."""

PREFILL_BLOCK = 64
"""Places of a tile where segments are long: the rows of one wgmma."""


@dataclass(frozen=True)
class TileCapacity:
    """The sizes of the tables: tokens that have an adapter, adapters, and tiles of their tokens."""

    places: int
    segments: int
    tiles: int

    @property
    def size(self) -> int:
        """Numbers in all of them together."""
        return self.places + 3 * (self.segments + self.tiles)

    @classmethod
    def of(cls, tokens: int, slots: int, block: int) -> TileCapacity:
        """The most that so many tokens can need, whichever of the slots each one has."""
        segments = min(tokens, slots)
        # Every segment may end in a tile that is not full.
        return cls(tokens, segments, segments + (tokens - segments) // block)


@dataclass(frozen=True)
class TokenTiles:
    """The tables of a step, one behind the other in `memory`; a tile has at most `block` places.

    Attributes:
        by_token: slot and place of each token (`token_places`), where a step's lists have them.
    """

    memory: Tensor
    capacity: TileCapacity
    block: int
    by_token: Tensor | None = None

    @property
    def order(self) -> Tensor:
        return self.memory[: self.capacity.places]

    @property
    def segments(self) -> Tensor:
        start = self.capacity.places
        return self.memory[start : start + 3 * self.capacity.segments].view(-1, 3)

    @property
    def tiles(self) -> Tensor:
        return self.memory[self.capacity.places + 3 * self.capacity.segments :].view(-1, 3)

    def to(self, device: torch.device) -> TokenTiles:
        """The same on a device."""
        return replace(self, memory=uploaded(self.memory, device))


def token_tiles(
    spans: Sequence[tuple[int, int, int]], block: int, capacity: TileCapacity | None = None
) -> TokenTiles:
    """Sort the tokens of a step by slot, on the host.

    Args:
        spans: neighbouring tokens with one adapter: first token, tokens, slot; -1 for none.
        block: places of a tile, at most: DECODE_BLOCK or PREFILL_BLOCK.
        capacity: sizes to fill up to; by default the sizes that are needed.
    Raises:
        CodegenError: spans share tokens, the capacity is too small, or no kernel takes such tiles.
    """
    if block not in (DECODE_BLOCK, PREFILL_BLOCK):
        raise CodegenError(f"a tile of {block} places; {DECODE_BLOCK} or {PREFILL_BLOCK} can be")
    own = sorted((slot, start, length) for start, length, slot in spans if slot >= 0 and length)
    order = _order(own)
    segments: list[list[int]] = []
    places = accumulate((length for _, _, length in own), initial=0)
    for place, (slot, _, length) in zip(places, own, strict=False):
        if segments and segments[-1][0] == slot:
            segments[-1][2] += length
        else:
            segments.append([slot, place, length])
    tiles = [
        [slot, first + done, min(block, count - done)]
        for slot, first, count in segments
        for done in range(0, count, block)
    ]
    needed = TileCapacity(len(order), len(segments), len(tiles))
    capacity = capacity or needed
    for kind in ("places", "segments", "tiles"):
        if getattr(needed, kind) > getattr(capacity, kind):
            raise CodegenError(
                f"{getattr(needed, kind)} {kind} of tokens with adapters, and capacity for "
                f"{getattr(capacity, kind)}; make that by TileCapacity.of as many tokens and slots"
            )
    memory = np.zeros(capacity.size, np.int32)
    memory[: len(order)] = order
    start = capacity.places
    memory[start : start + 3 * len(segments)] = np.ravel(segments)
    start += 3 * capacity.segments
    memory[start : start + 3 * len(tiles)] = np.ravel(tiles)
    return TokenTiles(torch.from_numpy(memory), capacity, block)


def tiles_on(spans: Sequence[tuple[int, int, int]], device: torch.device) -> TokenTiles:
    """The tables on a device, of tiles that fit the tokens; see `token_tiles`."""
    slots = len({slot for _, _, slot in spans})
    is_decode = sum(length for _, length, _ in spans) <= DECODE_BLOCK * slots
    return token_tiles(spans, DECODE_BLOCK if is_decode else PREFILL_BLOCK).to(device)


def _order(own: Sequence[tuple[int, int, int]]) -> np.ndarray:
    """The tokens of the spans one behind the other. CodegenError: two spans share a token."""
    end = 0
    for start, length, slot in sorted((start, length, slot) for slot, start, length in own):
        if start < end:
            raise CodegenError(
                f"{length} tokens from {start} with slot {slot} begin before the span in front of "
                f"them ends, at {end}; a token has one adapter at most"
            )
        end = start + length
    ranges = [np.arange(start, start + length, dtype=np.int32) for _, start, length in own]
    return np.concatenate([np.empty(0, np.int32), *ranges])
