"""Random split problems, and their least cost by trying every way to run them."""

import heapq
import itertools
import random
from collections.abc import Iterator
from typing import TypeVar

from pcg.passes.placement.split_problem import Side, SplitNode, SplitProblem, SplitValue

T = TypeVar("T")
_SIDES = (Side.CLIENT, Side.BASE, Side.BASE, Side.EITHER, Side.EITHER)


def random_problem(seed: int) -> SplitProblem:
    """A problem of up to six nodes, each of which makes something that is read or wanted."""
    draw = random.Random(seed)

    def value(name: str) -> SplitValue:
        return SplitValue(name, 1, draw.randint(0, 9), draw.randint(0, 9))

    values = [value(f"i{index}") for index in range(draw.randint(1, 2))]
    nodes: list[SplitNode] = []
    for index in range(draw.randint(3, 6)):
        count = draw.randint(1, min(2, len(values)))
        reads = tuple(sorted(draw.sample(range(len(values)), count)))
        made = range(len(values), len(values) + (1 if draw.random() < 0.85 else 2))
        values += [value(f"v{number}") for number in made]
        times = draw.randint(0, 4), draw.randint(0, 4)
        nodes.append(SplitNode(f"n{index}", draw.choice(_SIDES), *times, reads, tuple(made)))
    read = {number for node in nodes for number in node.reads}
    ends = {number for node in nodes if not read & {*node.makes} for number in node.makes}
    ends.update(draw.sample(range(len(values)), draw.randint(0, 1)))
    return SplitProblem(
        tuple(nodes), tuple(values), tuple(sorted(ends)), draw.choice((0, 1, 5, 20))
    )


def least_cost(problem: SplitProblem) -> int:
    """The least cost over all sets of values that the client can have, by the definition alone."""
    makers = problem.makers
    start = frozenset(number for number in range(len(problem.values)) if number not in makers)
    own = {n for node in problem.nodes if node.side is Side.CLIENT for n in node.makes}
    goal = own.union(problem.outputs)
    costs, tickets = {start: 0}, itertools.count()
    waiting = [(0, next(tickets), start)]
    while waiting:
        cost, _, has = heapq.heappop(waiting)
        if cost > costs[has]:
            continue
        if goal <= has:
            return cost
        for more, added in _moves(problem, has):
            after = has | more
            if cost + added < costs.get(after, cost + added + 1):
                costs[after] = cost + added
                heapq.heappush(waiting, (cost + added, next(tickets), after))
    raise AssertionError("nothing is left to run")


def _moves(problem: SplitProblem, has: frozenset[int]) -> Iterator[tuple[frozenset[int], int]]:
    for node in problem.nodes:
        if node.side is not Side.BASE and has.issuperset(node.reads):
            yield frozenset(node.makes), node.client_ps
    remote = [node for node in problem.nodes if node.side is not Side.CLIENT]
    for piece in _subsets(remote):
        made = {number for node in piece for number in node.makes}
        read = {number for node in piece for number in node.reads} - made
        if not read <= has:
            continue
        cost = problem.latency_ps + sum(node.base_ps for node in piece)
        cost += sum(problem.values[number].up_ps for number in read)
        for fetched in _subsets(sorted(made - has)):
            yield frozenset(fetched), cost + sum(problem.values[n].down_ps for n in fetched)


def _subsets(items: list[T]) -> Iterator[tuple[T, ...]]:
    for count in range(1, len(items) + 1):
        yield from itertools.combinations(items, count)
