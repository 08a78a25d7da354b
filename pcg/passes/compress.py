"""Compress: let backward read less than a value where less is all that it needs, without loss.

    relu_backward(dy, y)  reads y to see where it is positive: one bit an element, packed
                          as pack_signs(y) [.., n / 8], u8

The packed value is one more value of the forward graph that can be saved; whether it is, or y, or
neither, is decided with all the rest (`pcg.passes.memory.save_problem`). Where it is not saved,
`uncompressed` has backward read y again.

Other lossless savings need no operator of their own. A copy in fp32 of what is exact in bf16 is
recomputed from that, and a dropout mask is drawn again from its seed: both are cheap nodes for the
cut.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping

from pcg.ir.analysis.builder import Builder
from pcg.ir.graph import Graph, Value
from pcg.passes.differentiate import Differentiated, GradientPass, with_nodes

SIGNS_PER_BYTE = 8


class Compress(GradientPass):
    """Let forward make packed values, and backward read those."""

    name = "compress"

    def run(self, before: Differentiated) -> Differentiated:
        forward = Builder.extending(before.graph)
        inputs = {value.name: value for value in before.backward.inputs}
        nodes = []
        for node in before.backward.nodes:
            if node.op == "relu_backward" and _packs(node.inputs[1], inputs):
                y = node.inputs[1]
                signs = forward.add("pack_signs", [y], name=f"{y}_signs")
                inputs[signs] = Value(signs, forward.types[signs])
                node = dataclasses.replace(
                    node, op="relu_backward_packed", inputs=(node.inputs[0], signs)
                )
            nodes.append(node)
        return dataclasses.replace(
            before,
            graph=before.graph.replace(nodes=tuple(forward.nodes)),
            backward=with_nodes(before.backward, nodes, inputs.values()),
        )


def uncompressed(gradients: Differentiated, saved: Container[str]) -> Graph:
    """The backward graph with plain values instead of packed ones that are not saved."""
    backward = gradients.backward
    nodes, inputs = [], {value.name: value for value in backward.inputs}
    for node in backward.nodes:
        if node.op == "relu_backward_packed" and node.inputs[1] not in saved:
            dy, signs = node.inputs
            (y,) = gradients.graph.producers[signs].inputs
            inputs.setdefault(y, Value(y, gradients.graph.types[y]))
            node = dataclasses.replace(node, op="relu_backward", inputs=(dy, y))
        nodes.append(node)
    return with_nodes(backward, nodes, inputs.values())


def _packs(name: str, inputs: Mapping[str, Value]) -> bool:
    """Return whether the signs of a forward value's last dim fill whole bytes."""
    return name in inputs and inputs[name].type.features[-1] % SIGNS_PER_BYTE == 0
