"""The rooms that are recorded before the first step, of which there are not too many.

A graph keeps memory and takes time to record, so where an engine's steps can need more rooms than
`most`, some are left out: their steps run in the next larger room that is there. With the time t of
a layer's step in a room r, and the cheapest room h that holds it, the room is left out that loses
least, one after the other:

    loss    (t(h) - t(r)) / t(r)        steps are taken to be as frequent in one room as in another
    t       max(WEIGHTS_US, TOKEN_US · tokens) + MOVED_US · tokens + SPLIT_US · (splits + tiles)
            + ADAPTER_US · (adapter tiles + wide)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pcg.kernels.triton.step_rooms import StepRoom

MOST_ROOMS = 256
"""The most rooms of a warm-up. An engine of 256 sequences and 4,096 tokens a step, whose adapters
have ranks of up to 16, has 450 to 550, and more with higher ranks; of these 256, steps are expected
to lose at most 4 % and 1 % in the mean."""
WEIGHTS_US, TOKEN_US = 100.0, 0.55
"""A layer of Llama-3.1-8B on an H200: 436 MB at 4.3 TB/s, and 436 MFLOP a token at 790 TFLOP/s."""
MOVED_US = 0.045
"""What is moved of a token: some 190 KB a layer, a part of its logits among them."""
SPLIT_US, ADAPTER_US = 0.008, 0.03
"""Programs that end at once, of which a device runs about a thousand in a microsecond: one for each
of eight KV heads, and some 30 at the linears of a layer."""


def rooms_within(rooms: Sequence[StepRoom], most: int = MOST_ROOMS) -> tuple[StepRoom, ...]:
    """Return up to `most` of an engine's rooms, in their order, which hold all that these hold.

    There are more if that many hold steps that no other does.
    """
    sizes = np.array(rooms, dtype=np.int64).reshape(len(rooms), len(StepRoom._fields))
    decodes = np.array([room.decodes for room in rooms])
    times = np.array([expected_us(room) for room in rooms])
    holds = (sizes[:, None, :] >= sizes[None, :, :]).all(-1) & (decodes[:, None] == decodes)
    np.fill_diagonal(holds, val=False)
    # The time of each room's steps in each room that holds them, infinite in others.
    others = np.where(holds, times[:, None], np.inf)
    is_there = np.ones(len(rooms), dtype=bool)
    while is_there.sum() > most:
        losses = np.where(is_there, others.min(0) / times - 1, np.inf)
        gone = int(losses.argmin())
        if not np.isfinite(losses[gone]):
            break
        is_there[gone] = False
        others[gone] = np.inf
    return tuple(room for room, stays in zip(rooms, is_there, strict=True) if stays)


def expected_us(room: StepRoom) -> float:
    """Return the time of a layer's step in a room, for comparisons."""
    empty = SPLIT_US * (room.splits + room.tiles) + ADAPTER_US * (room.adapter_tiles + room.wide)
    return max(WEIGHTS_US, TOKEN_US * room.tokens) + MOVED_US * room.tokens + empty
