"""The values that cross between client and base, or are made again instead: a minimum cut.

Some values are wanted on one side. Each is sent there, or a node that makes it runs there (again)
over values that are wanted in turn:

    source -> n             time(n)        a repeated node costs its time on that side
    n      -> v             send(v)        a sent value costs its time on the link
    v      -> n reads v     infinite       a repeated node needs what it reads
    v      -> sink          infinite       what is wanted is there

With the sink's side read as "there", v there and its maker not is "sent". A value without a maker
that may run there hangs on the source by its price alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pcg.passes.memory.minimum_cut import SINK, SOURCE, Network
from pcg.passes.placement.split_problem import SplitProblem, bits, mask_of


@dataclass(frozen=True)
class Transfer:
    """Values that are sent, and nodes that are repeated, as masks, and the time of both."""

    sent: int
    repeated: int
    cost_ps: int


def cheapest_transfer(
    problem: SplitProblem,
    wanted: int,
    there: int,
    may_repeat: int,
    unsendable: int,
    is_up: bool,
) -> Transfer:
    """Return the cheapest way to have values on a side.

    Args:
        wanted: the values.
        there: values that are on that side anyway.
        may_repeat: nodes that may run on that side, whose every value is sent or made by such.
        unsendable: values that the other side does not have.
        is_up: True if the side is the base.
    """

    def send(value: int) -> int:
        one = problem.values[value]
        return one.up_ps if is_up else one.down_ps

    def run(node: int) -> int:
        one = problem.nodes[node]
        return one.base_ps if is_up else one.client_ps

    wanted &= ~there
    makers = problem.makers
    if not any(may_repeat >> makers[v] & 1 for v in bits(wanted) if v in makers):
        return Transfer(wanted, 0, sum(map(send, bits(wanted))))
    return _cut(problem, wanted, there, may_repeat, unsendable, (send, run))


def _cut(
    problem: SplitProblem,
    wanted: int,
    there: int,
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
                if not there >> read & 1:
                    edge(place_of(read), nodes[maker], None)
        edge(nodes[maker], values[value], price)
    found = Network(2 + len(values) + len(nodes), edges).sink_side(capacities)
    repeated = mask_of(node for node, at in nodes.items() if at in found)
    sent = mask_of(
        value
        for value, at in values.items()
        if at in found and not (value in makers and repeated >> makers[value] & 1)
    )
    cost = sum(map(send, bits(sent))) + sum(map(run, bits(repeated)))
    return Transfer(sent, repeated, cost)
