"""The line from the first rank of a group to the others: messages, and reports of ranks that end.

A message is bytes, which all others receive in order. It uses a separate group on the hosts, so
that a rank that waits for the next message keeps no GPU busy. A rank that ends by an error leaves a
report where all others look from time to time: these may wait for a rank that waits itself.
"""

from __future__ import annotations

import itertools
import struct
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pcg.errors import ParallelError
from pcg.ranks.group import ProcessRanks, Ranks
from pcg.ranks.join import TIMEOUT_S

BEAT_S = 1.0
"""The time after which the first rank sends a message though there is none, so that the others'
wait never times out, and it hears within seconds which one is gone."""
LOOK_S = 0.5
"""The time between two looks for the word of a rank that has ended."""
_BLOCK_BYTES = 512
"""Most messages fit into one block; of a longer one the rest follows."""
_LENGTH = struct.Struct("<q")
_FIRST_BYTES = _BLOCK_BYTES - _LENGTH.size
_HOST = torch.device("cpu")
_lines = itertools.count()  # all ranks make their lines in one order


class Line:
    """The line of a group, as a rank sees it; all of them make it together.

    Attributes:
        rank: the number of this rank.
        size: the number of ranks.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.rank = ranks.rank
        self.size = ranks.size
        self._ranks = ranks
        self._store: Any = None
        self._word = f"pcg/line/{next(_lines)}/ended/{{}}".format
        if isinstance(ranks, ProcessRanks):
            self._store = ranks._store
            self._ranks = ProcessRanks(_on_hosts(ranks), _HOST, ranks._store)

    def send(self, message: bytes) -> None:
        """Send a message from the first rank. RankLostError: another rank is gone."""
        first, rest = message[:_FIRST_BYTES], message[_FIRST_BYTES:]
        block = (_LENGTH.pack(len(message)) + first).ljust(_BLOCK_BYTES, b"\0")
        self._ranks.broadcast(_tensor(block))
        if rest:
            self._ranks.broadcast(_tensor(rest))

    def receive(self) -> bytes:
        """Wait for the first rank's next message. RankLostError: another rank is gone."""
        block = _bytes(self._ranks.broadcast(torch.zeros(_BLOCK_BYTES, dtype=torch.uint8)))
        (length,) = _LENGTH.unpack(block[: _LENGTH.size])
        first = block[_LENGTH.size : _LENGTH.size + length]
        if length <= _FIRST_BYTES:
            return first
        rest = torch.zeros(length - _FIRST_BYTES, dtype=torch.uint8)
        return first + _bytes(self._ranks.broadcast(rest))

    @property
    def has_words(self) -> bool:
        """True if ranks can leave a report; not in a group that pcg has not started."""
        return self._store is not None

    def leave_word(self, why: str) -> None:
        """Report to the other ranks that this rank has ended, and why."""
        if self._store is not None:
            try:
                self._store.set(self._word(self.rank), why)
            except RuntimeError:  # the rank that kept the store is gone, which they hear of
                return

    def word(self) -> str | None:
        """Return the report of another rank that has ended, or None.

        Raises:
            ParallelError: the rank that keeps all reports is gone.
        """
        if self._store is None:
            return None
        try:
            for rank in range(self.size):
                if rank != self.rank and self._store.check([self._word(rank)]):
                    said = self._store.get(self._word(rank)).decode(errors="replace")
                    return f"rank {rank} of {self.size} has ended: {said}"
        except RuntimeError as error:
            raise ParallelError(
                f"the process that started the {self.size} ranks, or rank 0, is gone; all ranks "
                "have to start again"
            ) from error
        return None


def _on_hosts(ranks: ProcessRanks) -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group(
        dist.get_process_group_ranks(ranks._group),
        timeout=timedelta(seconds=TIMEOUT_S),
        backend="gloo",
        use_local_synchronization=True,
    )
    return group


def _tensor(message: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)


def _bytes(message: torch.Tensor) -> bytes:
    return bytes(message.numpy())
