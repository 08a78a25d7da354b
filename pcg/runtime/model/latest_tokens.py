"""The tokens that a step chose, in the device's memory, for the next step to read before the host.

Such a token stands in a step's list of ids as -1 - its place among the tokens of the step before:

    id = ids[i]                       where ids[i] ≥ 0
       = max(latest[-1 - ids[i]], 0)  else

The maximum is for a sequence after which no token could be drawn; it fails once that is read.

Source: mini-sglang's and SGLang's map of future tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class LatestTokens:
    """The tokens of the latest step, in memory that stays.

    Args:
        most: the most tokens of a step.
    """

    def __init__(self, most: int, device: torch.device) -> None:
        self._memory = torch.zeros(most, dtype=torch.int64, device=device)
        self._places: dict[str, int] = {}

    def put(self, owners: Sequence[str], tokens: Tensor) -> None:
        """Keep the token [n] of each owner, which is a sequence's id, in place of those before."""
        self._memory[: len(tokens)].copy_(tokens)
        self._places = {owner: place for place, owner in enumerate(owners)}

    def id_of(self, owner: str) -> int:
        """Return the number that stands for an owner's token among the ids of the next step."""
        return -1 - self._places[owner]

    def resolved(self, ids: Tensor) -> Tensor:
        """Return ids [T] with the tokens that they stand for."""
        latest = self._memory[(-1 - ids).clamp(min=0)].clamp(min=0)
        return torch.where(ids < 0, latest, ids)
