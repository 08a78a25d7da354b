"""Requests that wait at a base, and the policies that choose which of them run together.

A client runs the same program again and again, so after a piece it requests the same piece as the
time before, and about as long after the reply. That predicts who requests a piece next, and when.

none           each request is a batch by itself, the oldest first
lockstep       a round starts once every active client has a request, and runs them all
opportunistic  a request waits for others of its piece (Symbiosis §3.7) that are expected by their
               history, as long as the batches saved take longer than the others delay it, and half
               as long where a user waits for tokens. It waits only while an active
               client may request its piece soon, and longer than its bound only while the base has
               something to run that nobody may join: for 2 n batches of n active clients at most.
               Inference precedes training that has waited for n batches or less; else the oldest
               request is first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from pcg.split.base.options import PolicyName
from pcg.split.messages import Piece


@dataclass(eq=False)
class Waiting:
    """A request that waits.

    Attributes:
        client: the client to answer.
        seq: the request's number, for the reply.
        tensors: the piece's inputs, [tokens, …] each.
        serves: True if a user waits for tokens; False if it trains.
        arrived_s: its arrival, on the clock of `time.monotonic`.
        key: the name of its key.
        most_tokens: the most tokens of a batch with it, if not the policy's.
        tokens: the number of its tokens.
        turn: the number of batches that had run when it arrived.
        think_s: the client's usual time from a reply to this piece; None if unknown.
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
    think_s: float | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.tokens = len(self.tensors[0])


_MOST_REMEMBERED = 4096
"""Pieces of a client whose successors are remembered; more than its program has."""
# benchmarks/split.py compares policies by these numbers.
NEAR = 3
"""Pieces between a client and the one that it is waited for at, at most."""
_LONGEST_S = 1.0
"""A longer time until a client comes again counts as so long: its user did something else."""
_WEIGHT = 0.25
"""The weight of the last measurement in a mean."""
_RISE = 0.02
"""The weight of a longer time of a batch than the shortest one."""


@dataclass
class _Pace:
    """The mean time from a reply to a client's request of the next piece, and its deviation."""

    mean_s: float | None = None
    deviation_s: float = 0.0

    def observe(self, seconds: float) -> None:
        """Learn from a time, as TCP does from a round trip's (RFC 6298)."""
        seconds = min(seconds, _LONGEST_S)
        if self.mean_s is None:
            self.mean_s, self.deviation_s = seconds, seconds / 2
            return
        self.deviation_s += _WEIGHT * (abs(seconds - self.mean_s) - self.deviation_s)
        self.mean_s += _WEIGHT * (seconds - self.mean_s)


@dataclass(frozen=True)
class Coming:
    """A client that is expected at a piece.

    Attributes:
        at_s: its expected arrival.
        think_s: its usual time after a reply, at the later end.
    """

    at_s: float
    think_s: float


class _Times:
    """The times of a kind of pieces' batches, by the number of their tokens.

    They are the recent shortest ones: other load of the machine only makes a batch longer.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def observe(self, tokens: int, seconds: float) -> None:
        size = tokens.bit_length()
        before = self._seconds.get(size, seconds)
        self._seconds[size] = min(seconds, before + _RISE * (seconds - before))

    @property
    def usual_s(self) -> float:
        """The time of a batch of the fewest tokens; 0 if unknown."""
        return self._seconds[min(self._seconds)] if self._seconds else 0.0

    @property
    def fixed_s(self) -> float:
        """The part that does not depend on the tokens: the gain of a batch fewer.

        Of the fewest tokens and the most, times at c + v · tokens; half of a single time.
        """
        if len(self._seconds) < 2:
            return self.usual_s / 2
        few, many = min(self._seconds), max(self._seconds)
        rise_s = (self._seconds[many] - self._seconds[few]) / ((1 << many) - (1 << few))
        return min(max(0.0, self._seconds[few] - rise_s * (1 << few)), self._seconds[few])


class Queues:
    """A queue for each piece that requests wait for, the oldest request first in each.

    Attributes:
        turn: the number of batches that were taken.
    """

    def __init__(self) -> None:
        self.turn = 0
        self._queues: dict[tuple[Piece, object], list[Waiting]] = {}
        self._last: dict[bytes, tuple[Piece, bool]] = {}
        self._replied_s: dict[bytes, float] = {}
        # From a piece, and whether it served, to the next one, and the pace of going there.
        self._next: dict[bytes, dict[tuple[Piece, bool], tuple[Piece, _Pace]]] = {}
        self._usual: dict[tuple[Piece, bool], tuple[Piece, _Pace]] = {}
        self._paces: dict[bytes, dict[Hashable, _Pace]] = {}
        self._times: dict[Hashable, _Times] = {}

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[list[Waiting]]:
        return iter(self._queues.values())

    def add(self, request: Waiting) -> None:
        """Add a request behind those of its piece and dtype."""
        request.turn = self.turn
        self._queues.setdefault((request.piece, request.tensors[0].dtype), []).append(request)
        steps = self._next.setdefault(request.client, {})
        paces = self._paces.setdefault(request.client, {})
        for known in (steps, self._usual, paces):
            if len(known) >= _MOST_REMEMBERED:
                known.clear()
        before = self._last.get(request.client)
        if before is not None:
            pace = paces.setdefault((_kind(before[0]), _kind(request.piece), before[1]), _Pace())
            replied_s = self._replied_s.pop(request.client, None)
            if replied_s is not None:
                pace.observe(request.arrived_s - replied_s)
            request.think_s = pace.mean_s
            steps[before] = self._usual[before] = (request.piece, pace)
        self._last[request.client] = (request.piece, request.serves)

    def ran(self, batch: Sequence[Waiting], took_s: float, now_s: float) -> None:
        """Learn from a batch that was answered just now."""
        for request in batch:
            if request.client in self._last:  # it may have left meanwhile
                self._replied_s[request.client] = now_s
        kind = _kind(batch[0].piece)
        if kind not in self._times and len(self._times) >= _MOST_REMEMBERED:
            self._times.clear()
        tokens = sum(request.tokens for request in batch)
        self._times.setdefault(kind, _Times()).observe(tokens, took_s)

    def saved_s(self, piece: Piece) -> float:
        """Return the time that is saved if a request joins a batch of a piece."""
        times = self._times.get(_kind(piece))
        return 0.0 if times is None else times.fixed_s

    def coming(
        self, clients: Collection[bytes], now_s: float
    ) -> tuple[Mapping[Piece, Mapping[bytes, Coming | None]], Collection[bytes]]:
        """Return the clients that may request pieces soon, and when.

        These are the clients that reach a piece in NEAR steps, by their own history or by that of
        another client at the same piece, which may run the same program.

        Returns:
            For each piece the clients, with None if their times are unknown; and the clients that
                are away without a known next piece.
        """
        by_piece: dict[Piece, dict[bytes, Coming | None]] = {}
        lost: set[bytes] = set()
        waiting = self.clients
        for client in clients:
            at, is_away = self._last.get(client), client not in waiting
            begun_s = self._replied_s.get(client) if is_away else now_s
            for distance in range(NEAR):
                step = None if at is None else self._next[client].get(at, self._usual.get(at))
                if at is None or step is None:
                    if is_away and not distance:
                        lost.add(client)
                    break
                if begun_s is not None and (distance or not is_away):
                    times = self._times.get(_kind(at[0]))
                    begun_s += 0.0 if times is None else times.usual_s
                (piece, pace), arrival = step, None
                if begun_s is not None and pace.mean_s is not None:
                    usual_s = pace.mean_s + pace.deviation_s
                    begun_s += usual_s
                    arrival = Coming(begun_s, usual_s)
                by_piece.setdefault(piece, {}).setdefault(client, arrival)
                at = (piece, at[1])
        return by_piece, lost

    def take(self, batch: Sequence[Waiting]) -> None:
        """Take requests out, which run now."""
        self.turn += 1
        chosen = set(map(id, batch))
        self._keep(lambda request: id(request) not in chosen)

    def drop(self, client: bytes) -> int:
        """Take out all of a client that is gone; return their number."""
        before = len(self)
        self._keep(lambda request: request.client != client)
        self._last.pop(client, None)
        self._next.pop(client, None)
        self._paces.pop(client, None)
        self._replied_s.pop(client, None)
        return before - len(self)

    def count(self, client: bytes) -> int:
        """Return the number of requests of a client."""
        return sum(request.client == client for queue in self for request in queue)

    def load_of(self, key: str) -> tuple[int, int]:
        """Return the tokens and the bytes of all requests of a key."""
        requests = [request for queue in self for request in queue if request.key == key]
        size = sum(tensor.nbytes for request in requests for tensor in request.tensors)
        return sum(request.tokens for request in requests), size

    @property
    def clients(self) -> set[bytes]:
        """The clients that wait."""
        return {request.client for queue in self for request in queue}

    @property
    def oldest(self) -> Waiting:
        return min((queue[0] for queue in self), key=lambda request: request.arrived_s)

    def _keep(self, is_kept: object) -> None:
        kept = {
            key: [request for request in queue if is_kept(request)]  # type: ignore[operator]
            for key, queue in self._queues.items()
        }
        self._queues = {key: queue for key, queue in kept.items() if queue}


def _kind(piece: Piece) -> Hashable:
    """Return a key of pieces with the same graph in several layers."""
    return piece.kind, piece.weights


@dataclass(frozen=True)
class Choice:
    """The decision of a policy.

    Attributes:
        batch: requests of a piece that run now, together; may be empty.
        wait_s: how long to wait for further requests before asking again, if nothing runs.
    """

    batch: Sequence[Waiting] = ()
    wait_s: float = 1.0


class Policy(ABC):
    """Chooses the next batch.

    Attributes:
        max_tokens: the most tokens of a batch; a larger request is a batch by itself.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens

    @abstractmethod
    def choose(self, queues: Queues, active: Collection[bytes], now_s: float) -> Choice:
        """Choose from waiting requests, which are not empty; `active` clients may send more."""

    def _fitting(self, requests: Sequence[Waiting]) -> Sequence[Waiting]:
        tokens = 0
        most = min(
            self.max_tokens, *(request.most_tokens or self.max_tokens for request in requests)
        )
        for index, request in enumerate(requests):
            tokens += request.tokens
            if index and tokens > most:
                return requests[:index]
        return requests


class Alone(Policy):
    """No batching: the oldest request."""

    def choose(self, queues: Queues, active: Collection[bytes], now_s: float) -> Choice:
        return Choice([queues.oldest])


class Lockstep(Policy):
    """Rounds: all active clients have a request, and each is run before any client's next."""

    def __init__(self, max_tokens: int) -> None:
        super().__init__(max_tokens)
        self._round: list[Waiting] = []

    def choose(self, queues: Queues, active: Collection[bytes], now_s: float) -> Choice:
        waiting = {id(request): request for queue in queues for request in queue}
        self._round = [request for request in self._round if id(request) in waiting]
        if not self._round:
            if not queues.clients.issuperset(active):
                return Choice(wait_s=0.05)
            self._round = list(waiting.values())
        first = self._round[0]
        same = [
            request
            for request in self._round
            if request.piece == first.piece and request.tensors[0].dtype == first.tensors[0].dtype
        ]
        return Choice(self._fitting(same))


class Opportunistic(Policy):
    """Requests wait for others as long as that saves time.

    Args:
        wait_s: the longest wait.
    """

    def __init__(self, max_tokens: int, wait_s: float) -> None:
        super().__init__(max_tokens)
        self._wait_s = wait_s

    def choose(self, queues: Queues, active: Collection[bytes], now_s: float) -> Choice:
        coming, lost = queues.coming(active, now_s)
        whole: list[tuple[int, int, list[Waiting]]] = []  # nobody may join them, or not in time
        due: list[tuple[int, int, list[Waiting]]] = []
        next_s = now_s + 1.0
        for place, queue in enumerate(queues):
            first = min(request.turn for request in queue)
            trains = not any(request.serves for request in queue)
            entry = (first + len(active) * trains, place, queue)
            near = {**dict.fromkeys(lost), **coming.get(queue[0].piece, {})}
            for request in queue:
                near.pop(request.client, None)
            is_late = queues.turn - first > 2 * len(active)
            is_full = sum(request.tokens for request in queue) >= self.max_tokens
            if is_late or is_full or not near:
                whole.append(entry)
                continue
            due_s = self._due_s(queue, near.values(), queues.saved_s(queue[0].piece), now_s)
            if due_s <= now_s:
                due.append(entry)
            next_s = min(next_s, due_s)
        if not whole and not due:
            return Choice(wait_s=next_s - now_s)
        # If one has to wait behind another in this queue, the one with a user waits less.
        queue = sorted(
            min(whole or due)[-1], key=lambda request: (not request.serves, request.arrived_s)
        )
        return Choice(self._fitting(queue))

    def _due_s(
        self,
        queue: Sequence[Waiting],
        coming: Collection[Coming | None],
        saved_s: float,
        now_s: float,
    ) -> float:
        """Return until when requests wait for others.

        A client that was waited for is at the same piece from then on. So the cost of waiting is
        the difference of its usual time from a reply to the next request and that of the waiting
        clients. With k such clients k batches are saved, each time, for a wait for the slowest of
        them. For a client of unknown times, the wait may be as long as the saving.
        """
        arrived_s = min(request.arrived_s for request in queue)
        wait_s = self._wait_s
        if any(request.serves for request in queue):
            wait_s /= 2
        else:
            saved_s *= 2
        here_s = max(
            (request.think_s for request in queue if request.think_s is not None), default=0.0
        )
        unknown = Coming(arrived_s + saved_s - wait_s, here_s)
        times = [unknown if arrival is None else arrival for arrival in coming]
        best_s, most_s, latest_s = now_s, 0.0, now_s
        times = [arrival for arrival in times if now_s < arrival.at_s + wait_s]
        for count, arrival in enumerate(sorted(times, key=lambda arrival: arrival.think_s), 1):
            latest_s = max(latest_s, arrival.at_s + wait_s)
            gained_s = count * saved_s - (arrival.think_s - here_s)
            if gained_s > most_s:
                best_s, most_s = latest_s, gained_s
        return min(best_s, max(now_s, arrived_s + wait_s))


def make_policy(name: PolicyName, max_tokens: int, wait_ms: float) -> Policy:
    """Return a policy by its name; see `BaseOptions`."""
    if name == "none":
        return Alone(max_tokens)
    if name == "lockstep":
        return Lockstep(max_tokens)
    return Opportunistic(max_tokens, wait_ms / 1000)
