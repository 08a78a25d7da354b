"""The cheapest cut of a split problem, by A* search for a shortest path over execution states.

A state is the set of nodes that ran, with all their predecessors, and the values of the base that
the client lacks; the base keeps nothing between calls. A move is a round trip, which runs a piece
(a set of nodes) at the base, or the client's run of a node of either side. `SplitProblem.eager`
nodes, such as the client's own, run at the client as soon as possible. Values that only later
pieces read need not return: those pieces compute them again. A minimum cut for each direction of a
round trip (`cheapest_transfer`) chooses the values to transfer and the nodes to repeat.

A single minimum cut over all nodes is not enough: it prices bytes and times but not round trips,
and may put nodes before and after the client's attention into the same piece. A copy of each node
for each phase does not help: a value that the client keeps is free in its phase and in all later
ones, and this cost is not a submodular function of two phases. A layer has few states, as few of
its nodes can run in any order.

Two round trips without a client's node in between merge into one, at no higher cost: values are
sent at most once, and need not return. A state with more values at the client, at no higher cost,
is never worse.

Minimum cut of a transfer: a side needs the wanted values. Each value is sent to that side, or its
maker runs there, perhaps again, and the maker's inputs are wanted as well. Edges, by capacity:

    source -> n                time(n)     a repeated node costs its time on that side
    n      -> v, made by n     send(v)     a sent value costs its time on the link
    v      -> n, if n reads v  infinite    a repeated node needs its inputs
    v      -> sink             infinite    a wanted value must be present

The nodes and values on the sink's side of the cut are on the wanting side after the transfer: a
value there is sent if its maker is not there. If the maker may not run there, source -> v: send(v).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from pcg.errors import UnsupportedError
from pcg.passes.memory.minimum_cut import SINK, SOURCE, Network
from pcg.passes.placement.split_problem import Side, SplitProblem, bits, mask_of

# ----------------------------------------------------------------------------------------- transfer


@dataclass(frozen=True)
class Transfer:
    """Sent values and repeated nodes, as masks, and the total time of both, in picoseconds."""

    sent: int
    repeated: int
    cost_ps: int


def cheapest_transfer(
    problem: SplitProblem,
    wanted: int,
    present: int,
    may_repeat: int,
    unsendable: int,
    is_up: bool,
) -> Transfer:
    """Return the cheapest transfer that provides the wanted values on a side; masks throughout.

    Args:
        wanted: values that the side needs.
        present: values that the side already has.
        may_repeat: nodes that may run on that side, to compute values instead of receiving them.
        unsendable: values that the other side does not have.
        is_up: True if the side is the base.
    """

    def send(value: int) -> int:
        split_value = problem.values[value]
        return split_value.up_ps if is_up else split_value.down_ps

    def run(node: int) -> int:
        split_node = problem.nodes[node]
        return split_node.base_ps if is_up else split_node.client_ps

    wanted &= ~present
    makers = problem.makers
    if not any(may_repeat >> makers[v] & 1 for v in bits(wanted) if v in makers):
        return Transfer(wanted, 0, sum(map(send, bits(wanted))))
    return _cut(problem, wanted, present, may_repeat, unsendable, (send, run))


def _cut(
    problem: SplitProblem,
    wanted: int,
    present: int,
    may_repeat: int,
    unsendable: int,
    prices: tuple[Callable[[int], int], Callable[[int], int]],
) -> Transfer:
    send, run = prices
    makers, edges = problem.makers, list[tuple[int, int]]()
    capacities: list[int | None] = []
    values: dict[int, int] = {}
    nodes: dict[int, int] = {}
    waiting = list(bits(wanted))

    def edge(before: int, after: int, capacity: int | None) -> None:
        edges.append((before, after))
        capacities.append(capacity)

    def place() -> int:
        return 2 + len(values) + len(nodes)

    def place_of(value: int) -> int:
        if value not in values:
            values[value] = place()
            waiting.append(value)
        return values[value]

    for value in bits(wanted):
        values[value] = place()
        edge(values[value], SINK, None)
    while waiting:
        value = waiting.pop()
        maker = makers.get(value)
        price = None if unsendable >> value & 1 else send(value)
        if maker is None or not may_repeat >> maker & 1:
            edge(SOURCE, values[value], price)
            continue
        if maker not in nodes:
            nodes[maker] = place()
            edge(SOURCE, nodes[maker], run(maker))
            for read in problem.nodes[maker].reads:
                if not present >> read & 1:
                    edge(place_of(read), nodes[maker], None)
        edge(nodes[maker], values[value], price)
    sink_side = Network(2 + len(values) + len(nodes), edges).sink_side(capacities)
    repeated = mask_of(node for node, at in nodes.items() if at in sink_side)
    sent = mask_of(
        value
        for value, at in values.items()
        if at in sink_side and not (value in makers and repeated >> makers[value] & 1)
    )
    cost = sum(map(send, bits(sent))) + sum(map(run, bits(repeated)))
    return Transfer(sent, repeated, cost)


# ---------------------------------------------------------------------------------------- exact cut


MOST_STATES = 200_000
"""Maximum number of states, and of pieces after a state; known models have some hundreds."""


@dataclass(frozen=True)
class RoundTrip:
    """A call of the base, as masks of nodes and of values.

    Attributes:
        nodes: nodes that run at the base for the first time anywhere.
        repeated: nodes that ran before, at the base or the client, and run again at the base.
        sent: values that the client sends.
        returned: values that the base returns.
        again: those of `nodes` that the client runs too, instead of receiving their values.
        cost_ps: time of the latency, the transfers and all these nodes, in picoseconds.
    """

    nodes: int
    repeated: int
    sent: int
    returned: int
    again: int
    cost_ps: int


@dataclass(frozen=True)
class Cut:
    """A way to run a graph: its round trips in order, and its time in picoseconds."""

    trips: tuple[RoundTrip, ...]
    cost_ps: int


def exact_cut(problem: SplitProblem) -> Cut:
    """Return the cheapest cut; raise UnsupportedError if the search exceeds MOST_STATES."""
    return _Search(problem).run()


def fixed_cut(problem: SplitProblem) -> Cut:
    """Return Symbiosis' cut: a call for each base-only node; the client runs all other nodes."""
    trips = []
    for number, node in enumerate(problem.nodes):
        if node.side is Side.BASE:
            sent, returned = mask_of(node.reads), mask_of(node.makes)
            cost = problem.latency_ps + node.base_ps
            cost += sum(problem.values[value].up_ps for value in bits(sent))
            cost += sum(problem.values[value].down_ps for value in bits(returned))
            trips.append(RoundTrip(1 << number, 0, sent, returned, 0, cost))
    client_ps = sum(node.client_ps for node in problem.nodes if node.side is not Side.BASE)
    return Cut(tuple(trips), client_ps + sum(trip.cost_ps for trip in trips))


@dataclass(frozen=True)
class _State:
    """The nodes that ran, and their values that the client lacks and that may be read later.

    `is_open` is True if the client ran a node since the last round trip; only then may one follow.
    """

    ran: int
    lost: int
    is_open: bool


class _Search:
    def __init__(self, problem: SplitProblem) -> None:
        self.problem = problem
        self.every = (1 << len(problem.nodes)) - 1
        self.at_base = mask_of(
            n for n, node in enumerate(problem.nodes) if node.side is not Side.CLIENT
        )
        self.either = mask_of(n for n, node in enumerate(problem.nodes) if node.side is Side.EITHER)
        self.timeless = replace(
            problem, nodes=tuple(replace(node, base_ps=0, client_ps=0) for node in problem.nodes)
        )
        self._closed = lru_cache(maxsize=None)(problem.closed)
        self._left = lru_cache(maxsize=None)(self._bound)
        self._behind = lru_cache(maxsize=None)(self._made_of)
        self._up = lru_cache(maxsize=None)(self._sent)
        self._down = lru_cache(maxsize=None)(self._returned)
        self._used_later = lru_cache(maxsize=None)(self._later)
        self._optional = lru_cache(maxsize=None)(self._worth_returning)
        self._pieces = lru_cache(maxsize=None)(self._pieces_behind)

    def run(self) -> Cut:
        problem = self.problem
        start = _State(self._closed(0), 0, True)
        costs = {start: self._client_ps(start.ran)}
        ways: dict[_State, tuple[_State, RoundTrip | None]] = {}
        settled: dict[int, list[tuple[int, _State]]] = {}
        tickets = itertools.count()
        waiting = [(0, next(tickets), costs[start], start)]
        while waiting:
            _, _, cost, state = heapq.heappop(waiting)
            if state.ran == self.every:
                return Cut(_trips(ways, state), cost)
            others = settled.setdefault(state.ran, [])
            if cost > costs[state] or _is_worse(cost, state, others):
                continue
            others.append((cost, state))
            if len(costs) > MOST_STATES:
                raise UnsupportedError(
                    f"the cut of a graph of {len(problem.nodes)} nodes has more than "
                    f"{MOST_STATES:,} states, as too many of its nodes can run in any order"
                )
            for after, added, trip in self._moves(state):
                if cost + added < costs.get(after, cost + added + 1):
                    costs[after] = cost + added
                    ways[after] = state, trip
                    bound = cost + added + self._left(after.ran)
                    heapq.heappush(waiting, (bound, next(tickets), cost + added, after))
        raise AssertionError("a graph's own order always runs")

    def _moves(self, state: _State) -> Iterator[tuple[_State, int, RoundTrip | None]]:
        problem, ran, lost = self.problem, state.ran, state.lost
        for number in bits(self.either & ~ran):
            node = problem.nodes[number]
            if not problem.before[number] & ~ran and not mask_of(node.reads) & lost:
                after = self._closed(ran | 1 << number)
                yield _State(after, lost, True), self._client_ps(after & ~ran), None
        if not state.is_open:
            return
        for piece in self._pieces(ran):
            yield from self._round_trips(state, piece)

    def _round_trips(self, state: _State, piece: int) -> Iterator[tuple[_State, int, RoundTrip]]:
        problem, lost = self.problem, state.lost
        ran = state.ran | piece
        after = self._closed(ran)
        if after == ran != self.every and not self._ready(ran):
            return
        piece_values = problem.made_by(piece)
        needed = piece_values & problem.wanted
        optional = self._optional(piece_values, ran)
        reads = problem.read_by(piece)
        up = self._up(reads, lost & self._behind(reads))
        base = sum(problem.nodes[n].base_ps for n in bits(piece))
        for chosen in range(1 << len(optional)):
            fetched = needed | mask_of(v for i, v in enumerate(optional) if chosen >> i & 1)
            down = self._down(fetched, piece, lost & reads)
            cost = problem.latency_ps + base + up.cost_ps + down.cost_ps
            trip = RoundTrip(piece, up.repeated, up.sent, down.sent, down.repeated, cost)
            then = _State(
                after, (lost | piece_values & ~fetched) & self._used_later(after), after != ran
            )
            yield then, cost + self._client_ps(after & ~ran), trip

    def _client_ps(self, nodes: int) -> int:
        return sum(self.problem.nodes[number].client_ps for number in bits(nodes))

    def _bound(self, ran: int) -> int:
        """Return a lower bound of the time from a state in which these nodes ran to the end.

        Each remaining node runs at least once, on its faster side at best. Transfers to the base
        cost at least the cut for all inputs of base-only nodes, if nodes are free and the base
        keeps values between calls; transfers to the client, the cut for its remaining values.
        """
        problem, left = self.problem, self.every & ~ran
        time = self._trips_left(ran) * problem.latency_ps
        for number in bits(left):
            node = problem.nodes[number]
            times = {Side.BASE: node.base_ps, Side.CLIENT: node.client_ps}
            time += times.get(node.side, min(node.base_ps, node.client_ps))
        base_nodes = left & self.at_base
        base_values = problem.made_by(base_nodes)
        reads = mask_of(v for n in bits(base_nodes & ~self.either) for v in problem.nodes[n].reads)
        has = ((1 << len(problem.values)) - 1) & ~base_values
        up = cheapest_transfer(self.timeless, reads, 0, self.at_base, 0, True)
        down = cheapest_transfer(
            self.timeless, problem.wanted & base_values, has, base_nodes & self.either, 0, False
        )
        return time + up.cost_ps + down.cost_ps

    def _trips_left(self, ran: int) -> int:
        """Return the least number of further round trips that the dependencies allow."""
        problem = self.problem
        at_client, at_base = [0] * len(problem.values), [1] * len(problem.values)
        for number in bits(self.every & ~ran):
            node = problem.nodes[number]
            client = max((at_client[value] for value in node.reads), default=0)
            base = max((at_base[value] for value in node.reads), default=1)
            if node.side is Side.BASE:
                client = base
            elif node.side is Side.CLIENT:
                base = client + 1
            for value in node.makes:
                at_client[value], at_base[value] = min(client, base), min(base, client + 1)
        return max((at_client[value] for value in bits(problem.wanted)), default=0)

    def _ready(self, ran: int) -> bool:
        before = self.problem.before
        return any(not before[number] & ~ran for number in bits(self.either & ~ran))

    def _later(self, ran: int) -> int:
        """Return the inputs of remaining nodes, and the values that compute them at the base."""
        nodes = self.problem.nodes
        return self._behind(mask_of(v for n in bits(self.every & ~ran) for v in nodes[n].reads))

    def _worth_returning(self, piece_values: int, ran: int) -> tuple[int, ...]:
        """Return the values of a piece that the client may fetch for later pieces or nodes.

        A value that only the piece's nodes read is left out if these nodes' results together cost
        no more to return, and no more to send.
        """
        problem, later = self.problem, self._used_later(ran)
        prices: dict[int, tuple[int, int]] = {}
        returned = []
        for value in reversed(tuple(bits(piece_values & later))):
            split_value = problem.values[value]
            if problem.wanted >> value & 1:
                prices[value] = 0, split_value.up_ps
                continue
            readers = bits(problem.readers[value])
            made_of_it = [prices.get(w, (0, 0)) for n in readers for w in problem.nodes[n].makes]
            down, up = (sum(price[way] for price in made_of_it) for way in (0, 1))
            is_read_later = problem.readers[value] & ~ran
            if is_read_later or split_value.down_ps < down or split_value.up_ps < up:
                returned.append(value)
                prices[value] = split_value.down_ps, split_value.up_ps
            else:
                prices[value] = down, up
        return tuple(returned)

    def _made_of(self, values: int) -> int:
        """Return the values and, recursively, the inputs of their makers that the base may run."""
        problem, waiting = self.problem, list(bits(values))
        while waiting:
            maker = problem.makers.get(waiting.pop())
            if maker is not None and self.at_base >> maker & 1:
                more = mask_of(problem.nodes[maker].reads) & ~values
                values |= more
                waiting += bits(more)
        return values

    def _sent(self, reads: int, lost: int) -> Transfer:
        return cheapest_transfer(self.problem, reads, 0, self.at_base, lost, True)

    def _returned(self, fetched: int, piece: int, lost: int) -> Transfer:
        problem = self.problem
        piece_values = problem.made_by(piece)
        may = 0
        for number in bits(piece & self.either):
            if not mask_of(problem.nodes[number].reads) & lost:
                may |= 1 << number
        # Other values count as present: `may` has no node that reads a value the client lacks.
        others = ((1 << len(problem.values)) - 1) & ~piece_values
        return cheapest_transfer(problem, fetched, others, may, 0, False)

    def _pieces_behind(self, ran: int) -> tuple[int, ...]:
        """Return the pieces that may run next: they need no remaining node outside the piece."""
        before, pieces, waiting = self.problem.before, {0}, [0]
        for piece in waiting:
            for number in bits(self.at_base & ~ran & ~piece):
                if not before[number] & ~(ran | piece):
                    more = piece | 1 << number
                    if more not in pieces:
                        pieces.add(more)
                        waiting.append(more)
            if len(pieces) > MOST_STATES:
                raise UnsupportedError(
                    f"a graph of {len(self.problem.nodes)} nodes has more than {MOST_STATES:,} "
                    "pieces, as too many of its nodes can run in any order"
                )
        return tuple(waiting[1:])


def _is_worse(cost: int, state: _State, others: list[tuple[int, _State]]) -> bool:
    """Return whether another state costs no more, lacks no other values, and is as open."""
    return any(
        least <= cost
        and not other_lost.lost & ~state.lost
        and (other_lost.is_open or not state.is_open)
        for least, other_lost in others
    )


def _trips(
    ways: dict[_State, tuple[_State, RoundTrip | None]], state: _State
) -> tuple[RoundTrip, ...]:
    trips = []
    while state in ways:
        state, trip = ways[state]
        if trip is not None:
            trips.append(trip)
    return tuple(reversed(trips))
