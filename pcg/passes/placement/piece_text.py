"""A piece in the form in which all clients that have it write it.

Values have numbers in place of names, inputs are in the order in which nodes read them, and outputs
in that in which nodes make them. So pieces of several clients are one where they compute the same.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from pcg.ir.graph import Graph
from pcg.ir.printer import print_graph


@dataclass(frozen=True)
class PieceText:
    """A piece as text, and the names that its inputs and outputs have in a client's graph."""

    text: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def piece_text(graph: Graph) -> PieceText:
    """Return a piece's text."""
    live = graph.without_dead_code()
    read = {name: None for node in live.nodes for name in node.inputs}
    given = {value.name: value for value in live.inputs}
    inputs = [name for name in read if name in given]
    known = {parameter.name: parameter for parameter in live.parameters}
    parameters = [known[name] for name in read if name in known]
    made = [value.name for node in live.nodes for value in node.outputs]
    outputs = [name for name in made if name in live.outputs]
    names = {name: f"p{n}" for n, name in enumerate(parameter.name for parameter in parameters)}
    names |= {name: f"v{n}" for n, name in enumerate([*inputs, *made])}
    plain = Graph(
        "piece",
        tuple(given[name] for name in inputs),
        tuple(parameters),
        tuple(dataclasses.replace(node, scope="") for node in live.nodes),
        tuple(outputs),
    )
    return PieceText(print_graph(plain.renamed(names)), tuple(inputs), tuple(outputs))
