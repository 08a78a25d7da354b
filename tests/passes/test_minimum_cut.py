"""Minimum cuts of networks, against those of networkx."""

import networkx
from hypothesis import given
from hypothesis import strategies as st

from pcg.passes.memory.minimum_cut import SINK, SOURCE, Network

PLACES = 8
EDGES = st.lists(
    st.tuples(
        st.integers(0, PLACES - 1),
        st.integers(0, PLACES - 1),
        st.one_of(st.none(), st.integers(0, 9), st.just(10**40)),
    ),
    max_size=24,
)


def least_sink_side(edges: list[tuple[int, int, int | None]]) -> set[int] | None:
    """The sink's side as networkx has it; None where a path is unbounded."""
    graph = networkx.DiGraph()
    graph.add_nodes_from(range(PLACES))
    for before, after, capacity in edges:
        if before == after:
            continue
        graph.add_edge(before, after)
        known = graph[before][after].get("capacity", 0)
        graph[before][after]["capacity"] = float("inf") if capacity is None else known + capacity
    try:
        return set(networkx.minimum_cut(graph, SOURCE, SINK)[1][1])
    except networkx.NetworkXUnbounded:
        return None


@given(EDGES)
def test_the_sink_side_is_that_of_networkx(edges: list[tuple[int, int, int | None]]) -> None:
    wanted = least_sink_side(edges)
    if wanted is None:
        return
    network = Network(PLACES, [(before, after) for before, after, _ in edges])
    assert network.sink_side([capacity for *_, capacity in edges]) == wanted


def test_one_network_is_cut_at_several_capacities() -> None:
    """Saving the first is cheaper, then the second; equally cheap, the sink's side is small."""
    network = Network(3, [(SOURCE, 2), (2, SINK)])
    assert network.sink_side([1, 2]) == {SINK, 2}
    assert network.sink_side([2, 1]) == {SINK}
    assert network.sink_side([1, 1]) == {SINK}
    assert network.sink_side([1, None]) == {SINK, 2}
