"""A piece: the graph that a call runs at the base, and its text, equal for all clients.

In the text, values are numbered, inputs are in the order of their readers, and outputs in the order
of their makers, so that clients with the same computation send the same text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pcg.ir.graph import Graph, Node, Parameter, Value
from pcg.ir.printer import print_graph

# -------------------------------------------------------------------------------------- piece graph


def piece_graph(
    name: str,
    graphs: Sequence[Graph],
    nodes: Iterable[str],
    inputs: Iterable[str],
    outputs: Iterable[str],
) -> Graph:
    """Return the graph of some nodes, with the views and parameters that they read.

    Args:
        graphs: a graph, or a forward and its backward, with the nodes.
        inputs: names of the values that are sent.
        outputs: names of the values that are returned.
    """
    types = {key: type_ for graph in reversed(graphs) for key, type_ in graph.types.items()}
    makers = {key: node for graph in graphs for key, node in graph.producers.items()}
    known = {
        key: parameter for graph in graphs for key, parameter in graph.parameters_by_name.items()
    }
    sent = tuple(inputs)
    available, chosen, parameters = set(sent), set[str](), dict[str, Parameter]()
    waiting: list[Node] = []
    for parameter in nodes:
        node = makers[parameter]
        chosen.add(node.name)
        available.update(value.name for value in node.outputs)
        waiting.append(node)
    while waiting:
        for read in waiting.pop().inputs:
            if read in known:
                parameters[read] = known[read]
            elif read not in available:
                node = makers[read]
                chosen.add(node.name)
                available.update(value.name for value in node.outputs)
                waiting.append(node)
    return Graph(
        name,
        tuple(Value(key, types[key]) for key in sent),
        tuple(parameter for key, parameter in known.items() if key in parameters),
        tuple(node for graph in graphs for node in graph.nodes if node.name in chosen),
        tuple(outputs),
    )


# --------------------------------------------------------------------------------------- piece text


@dataclass(frozen=True)
class PieceText:
    """A piece as text, and its inputs' and outputs' names in a client's graph."""

    text: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def piece_text(graph: Graph) -> PieceText:
    """Return a piece's text, with the names of its inputs and outputs."""
    live = graph.without_dead_code()
    read = {name: None for node in live.nodes for name in node.inputs}
    inputs_by_name = {value.name: value for value in live.inputs}
    inputs = [name for name in read if name in inputs_by_name]
    known = {parameter.name: parameter for parameter in live.parameters}
    parameters = [known[name] for name in read if name in known]
    made_names = [value.name for node in live.nodes for value in node.outputs]
    outputs = [name for name in made_names if name in live.outputs]
    names = {name: f"p{n}" for n, name in enumerate(parameter.name for parameter in parameters)}
    names |= {name: f"v{n}" for n, name in enumerate([*inputs, *made_names])}
    plain = Graph(
        "piece",
        tuple(inputs_by_name[name] for name in inputs),
        tuple(parameters),
        tuple(dataclasses.replace(node, scope="") for node in live.nodes),
        tuple(outputs),
    )
    return PieceText(print_graph(plain.renamed(names)), tuple(inputs), tuple(outputs))
