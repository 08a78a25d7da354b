"""Coalesce collectives: those that can go together are one message.

    s_q = all_gather(x_q), s_k = all_gather(x_k)      s_q, s_k = all_gathers(x_q, x_k)

The message stands where the last of them stood; what reads another of them moves behind it, and
nothing else moves. Which can go together is said by `pcg.parallel.coalescing`.
"""

from __future__ import annotations

import dataclasses
from typing import cast

from pcg.ir.graph import Graph, Node
from pcg.ir.program.program import TrainingGraph
from pcg.parallel.coalescing import accesses_of, coalesced_runs
from pcg.passes.pass_base import GraphPass, LayerPass


class CoalesceCollectives(GraphPass):
    """Make one node of neighbouring collectives of one kind."""

    name = "coalesce_collectives"

    def run(self, before: Graph) -> Graph:
        found = [run for run in coalesced_runs(accesses_of(before)) if len(run) > 1]
        if not found:
            return before
        ends = {run[-1]: _joined([before.nodes[place] for place in run]) for run in found}
        members = {place for run in found for place in run}
        nodes: list[Node] = []
        later: list[Node] = []
        waiting: set[str] = set()
        for place, node in enumerate(before.nodes):
            if place in ends:
                nodes += [ends[place], *later]
                later, waiting = [], set()
            elif place in members:
                waiting.update(value.name for value in node.outputs)
            elif waiting.intersection(node.inputs):
                waiting.update(value.name for value in node.outputs)
                later.append(node)
            else:
                nodes.append(node)
        return before.replace(nodes=tuple(nodes))


class CoalesceLayer(LayerPass):
    """Make one node of neighbouring collectives of a layer that trains."""

    name = CoalesceCollectives.name

    def run(self, before: TrainingGraph) -> TrainingGraph:
        if before.backward is None:
            return before
        forward, backward = map(CoalesceCollectives().run, (before.forward, before.backward))
        return dataclasses.replace(before, forward=forward, backward=backward)


def _joined(nodes: list[Node]) -> Node:
    inputs = tuple(node.inputs[0] for node in nodes)
    outputs = tuple(node.output for node in nodes)
    first = nodes[0]
    if first.op == "all_reduce":
        return Node("all_reduces", inputs, outputs, (), first.scope)
    dims = tuple(cast("int", node.attribute("dim")) for node in nodes)
    attributes = (("degree", first.attribute("degree")), ("dims", dims))
    return Node("all_gathers", inputs, outputs, attributes, first.scope)
