"""Requests that wait at a base, by the piece that they are for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from pcg.split.pieces import Piece


@dataclass(frozen=True, eq=False)
class Waiting:
    """A request that waits.

    Attributes:
        client: who is answered.
        seq: the request's number, for the reply.
        tensors: the piece's inputs, [tokens, …] each.
        serves: True if a user waits for tokens; False if it trains.
        arrived_s: when it came, on the clock of `time.monotonic`.
        key: the name of the key that it came with.
        tokens: the number of its tokens.
    """

    client: bytes
    seq: int
    piece: Piece
    tensors: Sequence[Tensor]
    serves: bool
    arrived_s: float
    key: str = ""
    tokens: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", len(self.tensors[0]))


class Queues:
    """One queue for each piece that requests wait for, the oldest request first in each."""

    def __init__(self) -> None:
        self._queues: dict[tuple[Piece, object], list[Waiting]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[list[Waiting]]:
        return iter(self._queues.values())

    def add(self, request: Waiting) -> None:
        """Add a request behind those of its piece and dtype."""
        self._queues.setdefault((request.piece, request.tensors[0].dtype), []).append(request)

    def take(self, batch: Sequence[Waiting]) -> None:
        """Take requests out, which run now."""
        chosen = set(map(id, batch))
        self._keep(lambda one: id(one) not in chosen)

    def drop(self, client: bytes) -> int:
        """Take out all of a client that is gone; returns how many there were."""
        before = len(self)
        self._keep(lambda one: one.client != client)
        return before - len(self)

    def count(self, client: bytes) -> int:
        """Return the number of requests of a client."""
        return sum(one.client == client for queue in self for one in queue)

    def load_of(self, key: str) -> tuple[int, int]:
        """Return the tokens and the bytes of all requests that came with a key."""
        own = [one for queue in self for one in queue if one.key == key]
        size = sum(tensor.nbytes for one in own for tensor in one.tensors)
        return sum(one.tokens for one in own), size

    @property
    def clients(self) -> set[bytes]:
        """The clients that wait."""
        return {one.client for queue in self for one in queue}

    @property
    def oldest(self) -> Waiting:
        """The request that came first."""
        return min((queue[0] for queue in self), key=lambda one: one.arrived_s)

    def _keep(self, is_kept: object) -> None:
        kept = {
            key: [one for one in queue if is_kept(one)]  # type: ignore[operator]
            for key, queue in self._queues.items()
        }
        self._queues = {key: queue for key, queue in kept.items() if queue}
