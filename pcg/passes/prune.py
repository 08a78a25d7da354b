"""Prune frozen gradients: drop what backward computes and nothing that is trained needs.

FlexLLM §5.2, algorithm 1, step 1, over the backward graph that `differentiate` made (its line 3):

    5–10   drop the outputs that nobody wants: gradients of frozen weights, and of inputs below
           which nothing is trained; queue the nodes that make them
    11–17  while the queue is not empty, take a node; where none of its outputs is read any more,
           drop it, and queue the nodes that made what it read
    18–22  what the remaining nodes read of the forward graph is `Differentiated.needed`

A gradient rule gives each gradient a node of its own, or several that read the same; so
UPDATEINPUT(n, O(n)) of a node is all its inputs while one of its outputs is read, and none after.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Iterable

from pcg.ir.graph import Graph
from pcg.passes.differentiate import Differentiated, GradientPass


class Prune(GradientPass):
    """Leave the gradients of adapters' parameters, and of the inputs where they are wanted."""

    name = "prune"

    def run(self, before: Differentiated) -> Differentiated:
        kept = {*before.wanted, *before.trained}
        names = (*before.wrt, *before.trained, *before.frozen)
        pairs = list(zip(names, before.backward.outputs, strict=True))
        outputs = tuple(gradient for name, gradient in pairs if name in kept)
        unwanted = [gradient for name, gradient in pairs if name not in kept]
        return dataclasses.replace(
            before,
            backward=_without(before.backward.replace(outputs=outputs), unwanted),
            wrt=tuple(name for name in before.wrt if name in kept),
            frozen=(),
        )


def _without(graph: Graph, unwanted: Iterable[str]) -> Graph:
    """The graph without what made these values and nothing else that is read."""
    readers = Counter([*graph.outputs, *(name for node in graph.nodes for name in node.inputs)])
    queue = deque(graph.producers[name] for name in unwanted if name in graph.producers)
    gone = set()
    while queue:
        node = queue.popleft()
        if node.name in gone or any(readers[value.name] for value in node.outputs):
            continue
        gone.add(node.name)
        for name in node.inputs:
            readers[name] -= 1
            if name in graph.producers:
                queue.append(graph.producers[name])
    return graph.replace(
        inputs=tuple(value for value in graph.inputs if readers[value.name]),
        parameters=tuple(p for p in graph.parameters if readers[p.name]),
        nodes=tuple(node for node in graph.nodes if node.name not in gone),
    )
