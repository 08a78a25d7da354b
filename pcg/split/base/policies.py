"""Policies of batching: which requests for a piece run together, and how long one waits for others.

none           each request runs alone, the oldest first
lockstep       a round begins once every active client has a request here, and runs them all
opportunistic  a request waits for others of its piece (Symbiosis §3.7) that are expected, by what
               they did before, as long as the batches that are saved take longer than they delay
               it, and half as long where a user waits for tokens. It waits only while an active
               client may come to its piece soon, and longer than its bound only while the base has
               something to run that nobody may join: for 2 n batches of n active clients at most.
               Inference is before training that has waited for n batches or less; else the request
               that came first is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pcg.split.base.options import PolicyName
from pcg.split.base.queues import Coming, Queues, Waiting


@dataclass(frozen=True)
class Choice:
    """The decision of a policy.

    Attributes:
        batch: requests of one piece that run now, as one; empty for none.
        wait_s: how long to wait for further requests before asking again, if nothing runs.
    """

    batch: Sequence[Waiting] = ()
    wait_s: float = 1.0


class Policy(ABC):
    """Decides what runs next.

    Attributes:
        max_tokens: the most tokens of a batch; a larger request runs alone.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens

    @abstractmethod
    def choose(self, queues: Queues, active: Collection[bytes], now_s: float) -> Choice:
        """Choose of requests that wait, at least one; `active` are the clients that may ask."""

    def _fitting(self, requests: Sequence[Waiting]) -> Sequence[Waiting]:
        """Return the first requests of some whose tokens fit in a batch."""
        tokens = 0
        most = min(self.max_tokens, *(one.most_tokens or self.max_tokens for one in requests))
        for index, one in enumerate(requests):
            tokens += one.tokens
            if index and tokens > most:
                return requests[:index]
        return requests


class Alone(Policy):
    """No batching: the oldest request."""

    def choose(self, queues: Queues, active: Collection[bytes], now_s: float) -> Choice:
        return Choice([queues.oldest])


class Lockstep(Policy):
    """Rounds: all active clients have a request, and each is run before anyone's next."""

    def __init__(self, max_tokens: int) -> None:
        super().__init__(max_tokens)
        self._round: list[Waiting] = []

    def choose(self, queues: Queues, active: Collection[bytes], now_s: float) -> Choice:
        there = {id(one): one for queue in queues for one in queue}
        self._round = [one for one in self._round if id(one) in there]
        if not self._round:
            if not queues.clients.issuperset(active):
                return Choice(wait_s=0.05)
            self._round = list(there.values())
        first = self._round[0]
        same = [
            one
            for one in self._round
            if one.piece == first.piece and one.tensors[0].dtype == first.tensors[0].dtype
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
            first = min(one.turn for one in queue)
            trains = not any(one.serves for one in queue)
            entry = (first + len(active) * trains, place, queue)
            near = {**dict.fromkeys(lost), **coming.get(queue[0].piece, {})}
            for one in queue:
                near.pop(one.client, None)
            is_late = queues.turn - first > 2 * len(active)
            if is_late or self._is_full(queue) or not near:
                whole.append(entry)
                continue
            due_s = self._due_s(queue, near.values(), queues.saved_s(queue[0].piece), now_s)
            if due_s <= now_s:
                due.append(entry)
            next_s = min(next_s, due_s)
        if not whole and not due:
            return Choice(wait_s=next_s - now_s)
        # If one has to wait behind another in this queue, the one with a user waits less.
        queue = sorted(min(whole or due)[-1], key=lambda one: (not one.serves, one.arrived_s))
        return Choice(self._fitting(queue))

    def _due_s(
        self,
        queue: Sequence[Waiting],
        coming: Collection[Coming | None],
        saved_s: float,
        now_s: float,
    ) -> float:
        """Return until when requests wait for others.

        Who is waited for once is at the same piece from then on, and so what counts is how much
        longer it usually takes from a reply to the next request than those that are here. With k
        such clients k batches are saved, each time, for a wait for the slowest of them. Of a client
        whose times are not known, as much as is saved may be waited.
        """
        arrived_s = min(one.arrived_s for one in queue)
        wait_s = self._wait_s
        if any(one.serves for one in queue):
            wait_s /= 2
        else:
            saved_s *= 2
        here_s = max((one.think_s for one in queue if one.think_s is not None), default=0.0)
        unknown = Coming(arrived_s + saved_s - wait_s, here_s)
        times = [unknown if one is None else one for one in coming]
        best_s, most_s, latest_s = now_s, 0.0, now_s
        times = [one for one in times if now_s < one.at_s + wait_s]
        for count, one in enumerate(sorted(times, key=lambda one: one.think_s), 1):
            latest_s = max(latest_s, one.at_s + wait_s)
            gained_s = count * saved_s - (one.think_s - here_s)
            if gained_s > most_s:
                best_s, most_s = latest_s, gained_s
        return min(best_s, max(now_s, arrived_s + wait_s))

    def _is_full(self, queue: Sequence[Waiting]) -> bool:
        return sum(one.tokens for one in queue) >= self.max_tokens


def make_policy(name: PolicyName, max_tokens: int, wait_ms: float) -> Policy:
    """Return a policy by its name; see `BaseOptions`."""
    if name == "none":
        return Alone(max_tokens)
    if name == "lockstep":
        return Lockstep(max_tokens)
    return Opportunistic(max_tokens, wait_ms / 1000)
