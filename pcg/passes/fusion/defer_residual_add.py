"""Defer residual sums: a layer returns the two summands, and the next norm's kernel adds them.

    x' = a + b                  a, b                      of each layer
    n = norm(x')                x' = a + b;  n = norm(x')     of the next, and of the epilogue

The kernel of the next layer's norm makes the sum on its way; alone it would be one more launch a
layer, which reads and writes what the norm reads again. The first layer is given x and zeros.
Serving programs only: backward would save both summands.
"""

from __future__ import annotations

import dataclasses

from pcg.ir.graph import Graph, Node, Value
from pcg.ir.program.program import ModelGraph
from pcg.ir.types import TOKENS
from pcg.passes.fusion.group_kernels import is_fusible
from pcg.passes.naming import unused_name
from pcg.passes.pass_base import ModelPass


class DeferResidualAdd(ModelPass):
    """Make the sums where they are read, where every layer ends in such a sum."""

    name = "defer_residual_add"

    def run(self, before: ModelGraph) -> ModelGraph:
        sums = [_last_sum(block) for block in before.blocks]
        # Where ranks hold parts of the tokens, a layer's input is gathered: once, not twice.
        if before.epilogue.inputs[0].type.shape[0] != TOKENS:
            return before
        blocks = []
        for block, last in zip(before.blocks, sums, strict=True):
            if last is None:
                return before
            nodes = tuple(node for node in block.nodes if node is not last)
            blocks.append(_summed(block.replace(nodes=nodes, outputs=last.inputs)))
        prologue = before.prologue
        first, *shared = prologue.outputs
        zeros = Value(unused_name("zeros", prologue.types), prologue.types[first])
        nodes = (*prologue.nodes, Node("sub", (first, first), (zeros,)))
        return dataclasses.replace(
            before,
            prologue=prologue.replace(nodes=nodes, outputs=(first, zeros.name, *shared)),
            blocks=tuple(blocks),
            epilogue=_summed(before.epilogue),
        )


def _last_sum(block: Graph) -> Node | None:
    """The sum that is a layer's only output; None if a kernel makes its summands anyway."""
    if len(block.outputs) != 1:
        return None
    last = block.producers.get(block.outputs[0])
    if last is None or last.op != "add" or len({*last.inputs, last.name}) != 3:
        return None
    if block.consumers.get(last.name):
        return None
    types = {block.types[name] for name in (*last.inputs, last.name)}
    return last if len(types) == 1 and all(_is_there(block, n) for n in last.inputs) else None


def _is_there(block: Graph, name: str) -> bool:
    """Return whether a value lies in memory, whatever kernel adds it."""
    made = block.producers.get(name)
    return made is None or not is_fusible(block, made) or len(block.consumers[name]) > 1


def _summed(graph: Graph) -> Graph:
    """The graph with the sum of two inputs in place of the input that was the sum."""
    x = graph.inputs[0]
    names = (unused_name(name, graph.types) for name in ("residual", "branch"))
    summands = [Value(name, x.type) for name in names]
    total = Node("add", tuple(value.name for value in summands), (x,))
    return graph.replace(inputs=(*summands, *graph.inputs[1:]), nodes=(total, *graph.nodes))
