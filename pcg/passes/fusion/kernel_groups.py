"""Group what one kernel can run: norms, rotary embedding, and chains of elementwise operators.

Groups begin with one node each. Going through the graph, a node's group and the group that made
what it reads become one where

    tokens and features      all that leaves the new group has the same number of each,
    rows                     what is summed over rows has the rows of all that leaves it,
    order                    no path leads from it through another node back into it.

So do, at last, groups that have to load two tensors or more of the size of what leaves them.

What a memory plan makes again in backward stands in the graph like any other node, so it is made in
registers beside what reads it. Views at a group's border cost nothing, and stay outside. In the end
some groups share a kernel, side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from math import prod

from pcg.ir.graph import Graph, Node
from pcg.ir.operators import operator
from pcg.passes.fusion.kernel_group import Group
from pcg.passes.fusion.side_by_side import items_of, side_by_side


def schedule(graph: Graph) -> tuple[Node | Group, ...]:
    """A graph's nodes in an order in which those of a group run together."""
    places = {node.name: i for i, node in enumerate(graph.nodes)}
    owner = list(range(len(graph.nodes)))
    members = [[i] for i in owner]

    def group(numbers: Sequence[int]) -> Group:
        return Group(graph, tuple(graph.nodes[i] for i in sorted(numbers)))

    def join(i: int, j: int) -> None:
        first, second = owner[j], owner[i]
        both = members[first] + members[second]
        if group(both).fits() and not _has_detour(graph, places, owner, first, second):
            members[first], members[second] = both, []
            for k in both:
                owner[k] = first

    for i, node in enumerate(graph.nodes):
        if not is_fusible(graph, node):
            continue
        for name in node.inputs:
            j = places.get(name)
            if j is not None and owner[j] != owner[i] and is_fusible(graph, graph.nodes[j]):
                join(i, j)
    for i, j in _reading_the_same(graph, places):
        if owner[j] != owner[i] and _loads_in_common(
            group(members[owner[i]]), group(members[owner[j]])
        ):
            join(i, j)
    fusible = [
        numbers for numbers in members if numbers and is_fusible(graph, graph.nodes[numbers[0]])
    ]
    found = [group(numbers).without_views_at_borders() for numbers in fusible]
    return _ordered(graph, side_by_side(graph, [one for one in found if _is_worth_a_kernel(one)]))


def is_fusible(graph: Graph, node: Node) -> bool:
    """Whether a kernel of a group can run a node, as far as it alone goes."""
    type_ = node.output.type
    if len(node.outputs) != 1 or not type_.is_token_wise or not type_.is_float:
        return False
    types = [type_, *(graph.types[name] for name in node.inputs)]
    sized = all(type_.dims and type_.is_sized for type_ in types)
    return sized and bool(type_.features) and operator(node.op).tiles(dict(node.attributes))


def _reading_the_same(graph: Graph, places: Mapping[str, int]) -> Iterator[tuple[int, int]]:
    """Pairs of nodes for kernels, a later and the first, which read one value of tokens."""
    for name, readers in graph.consumers.items():
        if graph.types[name].is_token_wise:
            first, *others = [places[n.name] for n in readers if is_fusible(graph, n)] or [0]
            yield from ((other, first) for other in others)


def _loads_in_common(one: Group, other: Group) -> bool:
    """Whether two groups read two tensors or more, as large as what leaves them."""
    types, size = one.graph.types, one.type.features
    both = {*one.inputs} & {*other.inputs} - one.graph.parameters_by_name.keys()
    return sum(prod(types[name].features) == prod(size) for name in both) > 1


def _has_detour(
    graph: Graph, places: dict[str, int], owner: Sequence[int], first: int, second: int
) -> bool:
    """Whether a path leads from one group to another through nodes of neither."""
    members: dict[int, list[int]] = {}
    for i, own in enumerate(owner):
        members.setdefault(own, []).append(i)

    def readers(group: int) -> set[int]:
        return {
            owner[places[reader.name]]
            for i in members[group]
            for value in graph.nodes[i].outputs
            for reader in graph.consumers.get(value.name, ())
        }

    # An edge from the second to the first would be a way back, too.
    waiting = list((readers(first) - {first, second}) | (readers(second) - {first, second}))
    seen = set(waiting)
    while waiting:
        for reader in readers(waiting.pop()):
            if reader in (first, second):
                return True
            if reader not in seen:
                seen.add(reader)
                waiting.append(reader)
    return False


def _is_worth_a_kernel(group: Group) -> bool:
    """Whether PyTorch would run more than one for it, and there is none yet."""
    computing = [node for node in group.nodes if not operator(node.op).is_view]
    if len(computing) != 1:
        return bool(computing)
    node = computing[0]
    # What is a function of ours there is several of PyTorch's; it does not append to the cache.
    return node.op == "append" or (
        operator(node.op).source(node.inputs, dict(node.attributes)).startswith("K.")
        and not operator(node.op).has_kernel
    )


def _ordered(graph: Graph, groups: Sequence[Group]) -> tuple[Node | Group, ...]:
    """Nodes and groups in an order in which all is made before it is read; as given where free."""
    item_of = items_of(graph, groups)
    places: dict[int, int] = {}
    items: list[Node | Group] = []
    for node in graph.nodes:
        item = item_of[node.name]
        if id(item) not in places:
            places[id(item)] = len(items)
            items.append(item)
    readers: list[set[int]] = [set() for _ in items]
    missing = [0] * len(items)
    for place, item in enumerate(items):
        read = item.inputs
        makers = {
            places[id(item_of[graph.producers[n].name])] for n in read if n in graph.producers
        }
        for maker in makers - {place}:
            readers[maker].add(place)
            missing[place] += 1
    ready = [place for place, count in enumerate(missing) if not count]
    heapify(ready)
    ordered = []
    while ready:
        place = heappop(ready)
        ordered.append(items[place])
        for reader in readers[place]:
            missing[reader] -= 1
            if not missing[reader]:
                heappush(ready, reader)
    assert len(ordered) == len(items)
    return tuple(ordered)
