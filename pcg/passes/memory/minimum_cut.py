"""Minimum cut of a network between its source and its sink, by augmentation along short paths.

Nodes are numbers; 0 is the source and 1 the sink. Among cuts of minimum capacity, the result has
the fewest nodes on the sink's side: the nodes with a path to the sink in the residual network of a
maximum flow, which are equal for all maximum flows.

Source: Y. Dinitz, Algorithm for solution of a problem of maximum flow in networks with power
estimation, 1970: each phase computes the levels from the sink, and fills all shortest paths.
"""

from __future__ import annotations

from collections.abc import Iterable

SOURCE, SINK = 0, 1


class Network:
    """A network: its edges are fixed, the capacities differ between cuts.

    Args:
        nodes: the number of nodes, including source and sink.
        edges: pairs of nodes.
    """

    def __init__(self, nodes: int, edges: Iterable[tuple[int, int]]) -> None:
        self._from: list[list[int]] = [[] for _ in range(nodes)]
        self._ends: list[int] = []
        for before, after in edges:
            # Edge 2 i is the i-th given edge, edge 2 i + 1 its reverse.
            self._from[before].append(len(self._ends))
            self._from[after].append(len(self._ends) + 1)
            self._ends += (after, before)

    def sink_side(self, capacities: Iterable[int | None]) -> set[int]:
        """Return the nodes on the sink's side, for the capacity of each edge; None is unbounded.

        Every path from the source to the sink has a bounded edge.
        """
        limits = list(capacities)
        unbounded = 1 + sum(limit for limit in limits if limit is not None)
        free: list[int] = []
        for limit in limits:
            free += (unbounded if limit is None else limit, 0)
        while True:
            levels = self._levels(free)
            if levels[SOURCE] < 0:
                return {node for node, level in enumerate(levels) if level >= 0}
            self._fill(free, levels)

    def _levels(self, free: list[int]) -> list[int]:
        """Return each node's number of free edges to the sink; -1 without a path."""
        levels = [-1] * len(self._from)
        levels[SINK] = 0
        reached = [SINK]
        for node in reached:
            for edge in self._from[node]:
                before = self._ends[edge]
                if levels[before] < 0 and free[edge ^ 1]:
                    levels[before] = levels[node] + 1
                    reached.append(before)
        return levels

    def _fill(self, free: list[int], levels: list[int]) -> None:
        """Send as much as possible along edges that lead a level closer to the sink."""
        ends, untried = self._ends, [list(edges) for edges in self._from]
        path: list[int] = []
        node = SOURCE
        while True:
            if node == SINK:
                sent = min(free[edge] for edge in path)
                for edge in path:
                    free[edge] -= sent
                    free[edge ^ 1] += sent
                # Continue at the first filled edge.
                place = next(i for i, edge in enumerate(path) if not free[edge])
                node = ends[path[place] ^ 1]
                del path[place:]
            edges, level = untried[node], levels[node] - 1
            while edges and not (free[edges[-1]] and levels[ends[edges[-1]]] == level):
                edges.pop()
            if edges:
                path.append(edges[-1])
                node = ends[edges[-1]]
            elif path:
                node = ends[path.pop() ^ 1]
                untried[node].pop()
            else:
                return
