"""The graph of a piece: what one call runs at the base, from what is sent to what is returned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pcg.ir.graph import Graph, Node, Parameter, Value


def piece_graph(
    name: str,
    graphs: Sequence[Graph],
    nodes: Iterable[str],
    inputs: Iterable[str],
    outputs: Iterable[str],
) -> Graph:
    """Return the graph of some nodes, with the views and parameters that they read.

    Args:
        graphs: a graph, or a forward and its backward, in which the nodes are.
        nodes: names of the nodes.
        inputs: names of the values that are sent.
        outputs: names of the values that are returned.
    """
    types = {key: type_ for graph in reversed(graphs) for key, type_ in graph.types.items()}
    makers = {key: node for graph in graphs for key, node in graph.producers.items()}
    known = {key: one for graph in graphs for key, one in graph.parameters_by_name.items()}
    sent = tuple(inputs)
    there, chosen, parameters = set(sent), set[str](), dict[str, Parameter]()
    waiting: list[Node] = []
    for one in nodes:
        node = makers[one]
        chosen.add(node.name)
        there.update(value.name for value in node.outputs)
        waiting.append(node)
    while waiting:
        for read in waiting.pop().inputs:
            if read in known:
                parameters[read] = known[read]
            elif read not in there:
                node = makers[read]
                chosen.add(node.name)
                there.update(value.name for value in node.outputs)
                waiting.append(node)
    return Graph(
        name,
        tuple(Value(key, types[key]) for key in sent),
        tuple(one for key, one in known.items() if key in parameters),
        tuple(node for graph in graphs for node in graph.nodes if node.name in chosen),
        tuple(outputs),
    )
