"""The adapter of each token, and the token's place among those that have one.

`token_tiles` lists tokens by adapter; a kernel that runs over tokens asks the other way round.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

NO_SLOT = -1


def token_places(spans: Sequence[tuple[int, int, int]], tokens: int) -> Tensor:
    """Slot and place of each token, [tokens, 2], int32, on the host.

    `spans` are those of `token_tiles.token_tiles`; a token of none has the slot -1.
    """
    found = np.zeros((tokens, 2), np.int32)
    found[:, 0] = NO_SLOT
    place = 0
    for slot, start, length in sorted((slot, start, length) for start, length, slot in spans):
        if slot >= 0:
            found[start : start + length, 0] = slot
            found[start : start + length, 1] = np.arange(place, place + length)
            place += length
    return torch.from_numpy(found)
