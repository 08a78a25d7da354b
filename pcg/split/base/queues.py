"""Requests that wait at a base, by the piece that they are for, and where clients go from there.

A client runs one program again and again, so it asks for what it asked for after the same piece the
time before. That says who may come to a piece next.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from pcg.split.pieces import Piece


@dataclass(eq=False)
class Waiting:
    """A request that waits.

    Attributes:
        client: who is answered.
        seq: the request's number, for the reply.
        tensors: the piece's inputs, [tokens, …] each.
        serves: True if a user waits for tokens; False if it trains.
        arrived_s: when it came, on the clock of `time.monotonic`.
        key: the name of the key that it came with.
        most_tokens: the most tokens of a batch with it, if not the policy's.
        tokens: the number of its tokens.
        turn: the number of batches that had run when it came.
    """

    client: bytes
    seq: int
    piece: Piece
    tensors: Sequence[Tensor]
    serves: bool
    arrived_s: float
    key: str = ""
    most_tokens: int | None = None
    tokens: int = field(init=False)
    turn: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.tokens = len(self.tensors[0])


_MOST_REMEMBERED = 4096
"""Pieces of a client whose successors are remembered; more than its program has."""
NEAR = 3
"""Pieces between a client and the one that it is waited for at, at most."""


class Queues:
    """One queue for each piece that requests wait for, the oldest request first in each.

    Attributes:
        turn: the number of batches that were taken.
    """

    def __init__(self) -> None:
        self.turn = 0
        self._queues: dict[tuple[Piece, object], list[Waiting]] = {}
        self._last: dict[bytes, tuple[Piece, bool]] = {}
        self._next: dict[bytes, dict[tuple[Piece, bool], Piece]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[list[Waiting]]:
        return iter(self._queues.values())

    def add(self, request: Waiting) -> None:
        """Add a request behind those of its piece and dtype."""
        request.turn = self.turn
        self._queues.setdefault((request.piece, request.tensors[0].dtype), []).append(request)
        followed = self._next.setdefault(request.client, {})
        if len(followed) >= _MOST_REMEMBERED:
            followed.clear()
        before = self._last.get(request.client)
        if before is not None:
            followed[before] = request.piece
        self._last[request.client] = (request.piece, request.serves)

    def may_come(self, clients: Collection[bytes]) -> Callable[[Sequence[Waiting]], bool]:
        """Return what says whether one of some clients may soon join the requests of a queue.

        That is a client whose way leads to their piece in NEAR steps, and one that is away and
        whose way is not known.
        """
        coming: dict[Piece, set[bytes]] = {}
        away = set(clients) - self.clients
        is_anywhere = False
        for client in clients:
            last = self._last.get(client)
            after = None if last is None else self._next[client].get(last)
            is_anywhere |= after is None and client in away
            for _ in range(NEAR):
                if last is None or after is None:
                    break
                coming.setdefault(after, set()).add(client)
                last = (after, last[1])
                after = self._next[client].get(last)

        def joins(queue: Sequence[Waiting]) -> bool:
            there = {one.client for one in queue}
            return is_anywhere or not coming.get(queue[0].piece, there) <= there

        return joins

    def take(self, batch: Sequence[Waiting]) -> None:
        """Take requests out, which run now."""
        self.turn += 1
        chosen = set(map(id, batch))
        self._keep(lambda one: id(one) not in chosen)

    def drop(self, client: bytes) -> int:
        """Take out all of a client that is gone; returns how many there were."""
        before = len(self)
        self._keep(lambda one: one.client != client)
        self._last.pop(client, None)
        self._next.pop(client, None)
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
