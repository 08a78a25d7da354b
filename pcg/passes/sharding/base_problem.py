"""The save problem of a layer's base, which is there whatever layouts its bypass networks have.

The layer without bypass networks is differentiated with respect to what it is given, and to the
values that the networks add to. Backward also reads the base's values that the networks' gradients
read, each in some layout, of which a part of every rank is the least; and where it recomputes a
value that a network adds to, it adds again, in the least time of any way.
"""

from __future__ import annotations

from collections.abc import Callable

from pcg.ir.builder import Builder
from pcg.ir.graph import Graph
from pcg.parallel.costs.rank_costs import RankCosts
from pcg.parallel.search import Search
from pcg.parallel.sequence_parallel import gradient_reads
from pcg.passes.compress import Compress
from pcg.passes.differentiate import Differentiate, LayerKind
from pcg.passes.memory.save_problem import Choice, SaveProblem
from pcg.passes.prune import Prune

_WEIGHT = 10**6


def base_cut(
    base: Graph, search: Search, kind: LayerKind, step: tuple[int, int, RankCosts, int]
) -> Callable[[float], Choice] | None:
    """The least that such a layer keeps and recomputes, by a rate of picoseconds a byte.

    `step` has its sequences, the tokens of each, costs, and the ranks that share these tokens. None
    where a layer has no backward.
    """
    if not kind.gradients.backward.outputs:
        return None
    graph, read = _with_parts(base, search, step[2].degree)
    count = len(graph.outputs)
    inputs = tuple(value.name for value in graph.inputs)
    passes_on = set(kind.gradients.wrt) & set(inputs[:count])
    nodes = {node.name: node for node in search.graph.nodes}
    added_to = (nodes[site.nodes[-1]].inputs[0] for site in search.sites)
    wrt = dict.fromkeys([*passes_on, *(name for name in added_to if name in graph.producers)])
    found = Compress().run(Prune().run(Differentiate(wrt=tuple(wrt)).run(graph)))
    needed = tuple(dict.fromkeys((*found.needed, *read)))
    problem = SaveProblem(found.graph, needed, inputs[count:], *step)
    for site in search.sites:
        last = search.kept.seconds(site.nodes[-1])
        problem.add_cost(nodes[site.nodes[-1]].inputs[0], min(last.values()))
    return lambda rate: problem.choose(round(rate * _WEIGHT), _WEIGHT)


def _with_parts(base: Graph, search: Search, degree: int) -> tuple[Graph, list[str]]:
    """The layer with each rank's part of what the networks' gradients read, and these parts."""
    builder, read = Builder.extending(base), []
    made = base.producers.keys() - search.graph.parameters_by_name.keys()
    for name in _read_by_sites(search):
        if name not in made:
            continue
        whole, local = search.graph.types[name], base.types[name]
        if local == whole and int(whole.shape[-1]) % degree == 0:
            name = builder.add("own_part", [name], dim=-1, degree=degree, kept=True)
        elif local == whole:
            continue
        read.append(name)
    return base.replace(nodes=tuple(builder.nodes)), read


def _read_by_sites(search: Search) -> list[str]:
    """Values that gradients of the networks read."""
    found: dict[str, None] = {}
    own = {name for site in search.sites for name in site.nodes}
    for node in search.graph.nodes:
        if node.name in own:
            places, _ = gradient_reads(search.graph, node, search.planner.active)
            found |= dict.fromkeys(node.inputs[place] for place in sorted(places))
    return list(found)
