"""The cut against every other choice; what a plan keeps; and that its numbers do not change."""

from __future__ import annotations

import dataclasses
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pcg.ir.analysis.dataflow import graph_flops, node_flops
from pcg.ir.analysis.storages import Storages
from pcg.ir.analysis.verifier import verify
from pcg.ir.graph import Graph
from pcg.ir.operators import operator
from pcg.options import MemoryBudget
from pcg.passes.attach import attach
from pcg.passes.graphs.differentiate import Differentiate, LayerKind
from pcg.passes.graphs.gradients import Compress, Prune
from pcg.passes.memory.plan import mixed, mixes, spread
from pcg.passes.memory.recompute import plan_layer
from pcg.passes.memory.save_problem import Choice, SaveProblem
from tests.support.bypasses import lora
from tests.support.chain import STEPS, chain
from tests.support.evaluate import evaluate, random_values
from tests.support.mlp import mlp_model

UP, DOWN = "model.layers.{layer}.up", "model.layers.{layer}.down"
TOKENS_HERE = 3


def kind_of(graph: Graph) -> LayerKind:
    gradients = Prune().run(Differentiate(wrt=("x",)).run(graph))
    return LayerKind(graph.name, 0, (0,), (), gradients)


def problem(kind: LayerKind) -> SaveProblem:
    gradients = kind.gradients
    return SaveProblem(gradients.graph, gradients.needed, kind.shared, 1, TOKENS_HERE)


def every_choice(graph: Graph, needed: tuple[str, ...]) -> list[tuple[int, int]]:
    """(bytes, operations) of every set of storages that backward can do with."""
    storages = Storages.of(graph)
    roots = {storages[name].name: storages[name] for name in graph.types}
    roots = {name: storage for name, storage in roots.items() if not storage.is_parameter}
    makers = {name: graph.producers.get(name) for name in roots}
    found = []
    for count in range(len(roots) + 1):
        for kept in combinations(roots, count):
            remade: set[str] = set()
            open_ = [storages[name].name for name in needed]
            possible = True
            while open_:
                name = open_.pop()
                if name in kept or name in remade:
                    continue
                maker = makers[name]
                if maker is None:
                    possible = False
                    break
                remade.add(name)
                reads = (storages[read] for read in maker.inputs)
                open_ += [storage.name for storage in reads if not storage.is_parameter]
            if possible:
                size = sum(int(roots[name].size_bytes(TOKENS_HERE)) for name in kept)
                nodes = {makers[name].name: makers[name] for name in remade}  # type: ignore[union-attr]
                flops = sum(
                    node_flops(graph, node, TOKENS_HERE, TOKENS_HERE)  # type: ignore[arg-type]
                    for node in nodes.values()
                )
                found.append((size, flops))
    return found


def lower_hull(points: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Vertices from no operation made again to the fewest bytes."""
    start = min(p for p in points if p[1] == 0)
    hull = [start]
    while rest := [p for p in points if p[0] < hull[-1][0]]:
        size, flops = hull[-1]
        best = min((p[1] - flops) / (size - p[0]) for p in rest)
        hull.append(min(p for p in rest if (p[1] - flops) / (size - p[0]) == best))
    return hull


@pytest.mark.parametrize("sites", [(UP,), (DOWN,), (UP, DOWN)], ids=["up", "down", "both"])
def test_no_set_of_storages_is_better(sites: tuple[str, ...]) -> None:
    (graph,) = attach(mlp_model(), lora(dict.fromkeys(sites, 2))).blocks
    kind = kind_of(graph)
    frontier = problem(kind).frontier()
    expected = lower_hull(every_choice(graph, kind.gradients.needed))
    assert [(choice.size_bytes, choice.flops) for choice in frontier] == expected
    assert len(expected) > 1


@given(STEPS.filter(lambda steps: len(steps) <= 5))
def test_no_set_of_storages_is_better_in_any_chain(steps: list[str]) -> None:
    kind = kind_of(chain(steps))
    graph = kind.gradients.graph
    if len([n for n in graph.types if n not in graph.parameters_by_name]) > 14:
        return
    frontier = problem(kind).frontier()
    expected = lower_hull(every_choice(graph, kind.gradients.needed))
    assert [(choice.size_bytes, choice.flops) for choice in frontier] == expected


def backward_values(kind: LayerKind, saved: tuple[str, ...]) -> tuple[torch.Tensor, ...]:
    """The gradients, by the forward and backward of a plan."""
    graph = kind.gradients.graph
    plan = plan_layer(kind, saved, "layer")
    verify(plan.forward)
    assert plan.backward is not None
    verify(plan.backward)
    values = random_values(graph, tokens=TOKENS_HERE)
    upstream = {
        f"d_{name}": torch.linspace(-1, 1, TOKENS_HERE * 4, dtype=torch.float64)
        .reshape(TOKENS_HERE, 4)
        .to(values["x"].dtype)
        for name in graph.outputs
    }
    made = dict(zip(plan.forward.outputs, evaluate(plan.forward, values), strict=True))
    given_values = {name: (values | made)[name] for name in plan.saved}
    parameters = {p.name: values[p.name] for p in plan.backward.parameters}
    return evaluate(plan.backward, given_values | parameters | upstream)


@given(STEPS)
def test_gradients_are_the_same_bits_under_every_choice(steps: list[str]) -> None:
    kind = kind_of(chain(steps))
    expected = backward_values(kind, kind.gradients.needed)
    for choice in problem(kind).frontier():
        for found, wanted in zip(backward_values(kind, choice.saved), expected, strict=True):
            assert torch.equal(found, wanted)


def test_a_choice_says_what_its_backward_does() -> None:
    (graph,) = attach(mlp_model(), lora({UP: 2, DOWN: 2})).blocks
    kind = kind_of(graph)
    for choice in problem(kind).frontier():
        plan = plan_layer(kind, choice.saved, "layer")
        assert plan.backward is not None
        own = {node.name for node in graph.nodes} & set(plan.backward.producers)
        again = [node for node in graph.nodes if node.name in own]
        products = [node.name for node in again if operator(node.op).is_product]
        assert products == list(choice.recomputed)
        assert choice.flops == sum(node_flops(graph, node, 3, 3) for node in again)
        storages = Storages.of(plan.forward)
        sizes = {storages[n].name: storages[n].size_bytes(TOKENS_HERE) for n in plan.saved}
        assert sum(sizes.values()) == choice.size_bytes
    assert choice.flops < graph_flops(graph, 3, 3)


# ------------------------------------------------------------------------------------ compression


def relu_layer(width: int) -> Graph:
    from pcg.ir.parser import parse_graph

    return parse_graph(
        f"""
graph @block_0(%x: f32[T, 4]) {{
  frozen %up: f32[{width}, 4] = "up"
  frozen %down: f32[4, {width}] = "down"
  adapter %b: f32[4] = "b"
  %y: f32[T, {width}] = linear(%x, %up)
  %relu: f32[T, {width}] = relu(%y)
  %z: f32[T, 4] = linear(%relu, %down)
  return %z
}}
"""
    )


def test_signs_are_kept_for_relu_alone() -> None:
    kind = kind_of(relu_layer(16))
    packed = dataclasses.replace(kind, gradients=Compress().run(kind.gradients))
    plain, compressed = (problem(k).choose(1, None) for k in (kind, packed))
    assert (plain.saved, compressed.saved) == (("relu",), ("relu_signs",))
    assert plain.size_bytes == 32 * compressed.size_bytes
    expected = backward_values(kind, ("relu",))
    for saved in (("relu_signs",), ("relu",), ("x",)):
        (found,) = backward_values(packed, saved)
        assert torch.equal(found, expected[0])
    plan = plan_layer(packed, ("x",), "layer")
    assert plan.backward is not None
    assert "pack_signs" not in {node.op for node in plan.backward.nodes}


def test_signs_that_fill_no_byte_stay() -> None:
    kind = kind_of(relu_layer(12))
    assert Compress().run(kind.gradients).graph == kind.gradients.graph


@given(st.lists(st.floats(-2, 2, width=32), min_size=16, max_size=16))
def test_packed_signs_say_where_relu_lets_through(numbers: list[float]) -> None:
    from pcg.kernels.torch import ops as torch_ops

    y = torch.tensor(numbers).reshape(1, 16)
    dy = torch.arange(16.0).reshape(1, 16) + 1
    packed = torch_ops.relu_backward_packed(dy, torch_ops.pack_signs(y))
    assert torch.equal(packed, torch.ops.aten.threshold_backward(dy, torch.relu(y), 0))


# ----------------------------------------------------------------------------------------- budgets


def choice(size: int, flops: int) -> Choice:
    return Choice((), (), size, flops, flops)


HULLS = st.lists(
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), max_size=4), min_size=1, max_size=4
)


def hull_from(steps: list[tuple[int, int]]) -> list[Choice]:
    """A convex frontier whose steps are these, the cheapest first."""
    ordered = sorted(steps, key=lambda step: step[1] / step[0])
    size = 10 + sum(step[0] for step in ordered)
    found = [choice(size, 0)]
    for less, more in ordered:
        found.append(choice(found[-1].size_bytes - less, found[-1].flops + more))
    return found


@given(HULLS)
def test_every_mix_on_the_way_is_best_at_its_price(steps: list[list[tuple[int, int]]]) -> None:
    frontiers = [hull_from(s) for s in steps]
    totals = [mixed(frontiers, mix, {}) for mix in mixes(frontiers, {})]
    sizes = [total.size_bytes for total in totals]
    assert sizes == sorted(sizes, reverse=True)
    rates = [(b.flops - a.flops) / (a.size_bytes - b.size_bytes) for a, b in pairwise(totals)]
    assert all(a <= b + 1e-12 for a, b in pairwise(rates))
    for share in (0.0, 0.3, 1.0):
        mix = spread(frontiers, MemoryBudget(share), 0, {})
        limit = sizes[-1] + share * (sizes[0] - sizes[-1])
        assert mixed(frontiers, mix, {}).size_bytes <= limit
        before = [t for t in totals if t.flops < mixed(frontiers, mix, {}).flops]
        assert all(total.size_bytes > limit for total in before)


@given(HULLS, st.integers(0, 60), st.integers(1, 30), st.sampled_from([0.0, 0.2, 0.6, 1.0]))
def test_a_hull_may_begin_with_more_bytes_than_no_product_recomputed(
    steps: list[list[tuple[int, int]]], less: int, cost: int, share: float
) -> None:
    """As costs in seconds have it: the budget decides, and the hull's mixes are as before."""
    hulls = [hull_from(s) for s in steps]
    firsts = [choice(max(hull[0].size_bytes - less, hull[-1].size_bytes), cost) for hull in hulls]
    frontiers = [[first, *hull] for first, hull in zip(firsts, hulls, strict=True)]
    most, least = (sum(f[i].size_bytes for f in frontiers) for i in (0, -1))
    mix = spread(frontiers, MemoryBudget(share), 0, {})
    assert mix is not None
    limit = least + share * (most - least)
    if not any(mix):
        assert most <= limit
        return
    assert most > limit
    found = mixed(frontiers, mix, {})
    assert found.size_bytes <= limit
    totals = [mixed(hulls, other, {}) for other in mixes(hulls, {})]
    assert found.cost == min(total.cost for total in totals if total.size_bytes <= limit)


def test_equal_layers_take_their_steps_first_to_last() -> None:
    frontiers = [hull_from([(4, 1)])] * 3
    assert list(mixes(frontiers, {})) == [(0, 0, 0), (1, 0, 0), (1, 1, 0), (1, 1, 1)]


@pytest.mark.parametrize(
    ("written", "share", "size_bytes"),
    [
        (None, 1.0, None),
        (0, 0.0, None),
        (1, 1.0, None),
        ("0.25", 0.25, None),
        (1024, None, 1024),
        ("1B", None, 1),
        ("1.5GiB", None, 3 * 2**29),
        ("2 MB", None, 2_000_000),
    ],
)
def test_budgets_as_users_write_them(
    written: object, share: float | None, size_bytes: int | None
) -> None:
    budget = MemoryBudget.parse(written)
    assert (budget.share, budget.size_bytes) == (share, size_bytes)
