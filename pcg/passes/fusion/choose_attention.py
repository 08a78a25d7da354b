"""Name the library that computes attention, where there is one that knows its heads and scores.

    out, lse = attention(q, k, v)   →   out, lse = attention(q, k, v) {library = flash_attn}

A program that serves names those for prompts, one that trains those for training; what they leave
is for the program's own kernels (`pcg.kernels.attention_libraries`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from pcg.codegen.program_functions import Function
from pcg.ir.graph import Graph, Node
from pcg.kernels.attention_libraries import AttentionLibrary
from pcg.passes.pass_base import Pass
from pcg.passes.stages import Functions


@dataclass(frozen=True)
class ChooseAttention(Pass[Functions, Functions]):
    """Let libraries compute the attention that they know.

    Attributes:
        libraries: the libraries that may be called.
    """

    name = "choose_attention"
    libraries: tuple[AttentionLibrary, ...] = ()

    def run(self, before: Functions) -> Functions:
        return dataclasses.replace(
            before,
            serving=self._changed(before.serving, "prompts"),
            training=self._changed(before.training, "training"),
        )

    def _changed(self, functions: Iterable[Function], use: str) -> tuple[Function, ...]:
        libraries = [library for library in self.libraries if library.use == use]
        return tuple(
            dataclasses.replace(one, graph=_with_libraries(one.graph, libraries))
            for one in functions
        )


def _with_libraries(graph: Graph, libraries: Iterable[AttentionLibrary]) -> Graph:
    def changed(node: Node) -> Node:
        if node.op not in ("attention", "attention_backward"):
            return node
        found = next((one.name for one in libraries if one.knows(graph, node)), None)
        if found is None:
            return node
        attributes = {**dict(node.attributes), "library": found}
        return dataclasses.replace(node, attributes=tuple(sorted(attributes.items())))

    return graph.replace(nodes=tuple(changed(node) for node in graph.nodes))
