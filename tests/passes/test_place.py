"""The cut between base and client is the cheapest, runs, and is as expected of known models."""

import dataclasses
import functools

import peft
import pytest
import torch

from pcg.errors import UnsupportedError
from pcg.explain.planned_model import adapter_use
from pcg.given_module import source_of
from pcg.ir.analysis.verifier import verify
from pcg.ir.parser import parse_graphs
from pcg.ir.program.program import ModelGraph
from pcg.options import PlanOptions, SplitLink
from pcg.parallel.costs.catalog import find_cost_model
from pcg.passes.graphs.differentiate import Differentiate
from pcg.passes.graphs.gradients import Prune
from pcg.passes.pipeline import Settings, pipeline
from pcg.passes.place import Place, Placed
from pcg.passes.placement import exact_cut
from pcg.passes.placement.cut import GraphCut, Piece, cut_graph
from pcg.passes.placement.exact_cut import Cut, fixed_cut
from pcg.passes.placement.split_graph import SplitGraph, split_problem
from pcg.passes.placement.split_problem import Side, SplitCosts, SplitProblem, bits
from pcg.passes.stages import Base, Gradients
from pcg.peft.adapter_files import recipes_of
from tests.support.evaluate import evaluate, random_values
from tests.support.split_problems import least_cost, random_problem

LLAMA = "meta-llama/Llama-3.1-8B"
QV = peft.LoraConfig(r=16, target_modules=["q_proj", "v_proj"])
LINKS = ("shared", "lan", "wan")


# ------------------------------------------------------------------------------------- the search


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_no_way_to_run_a_graph_is_cheaper(first: int) -> None:
    for seed in range(first, first + 50):
        problem = random_problem(seed)
        found = exact_cut.exact_cut(problem)
        assert found.cost_ps == least_cost(problem), f"seed {seed}"
        assert found.cost_ps <= fixed_cut(problem).cost_ps
        assert cost_of_running(problem, found) == found.cost_ps, f"seed {seed}"


def cost_of_running(problem: SplitProblem, cut: Cut) -> int:
    """The cost of a cut's steps one by one, each from what is there."""
    nodes, values, makers = problem.nodes, problem.values, problem.makers
    has = {number for number in range(len(values)) if number not in makers}
    at_base = {n for trip in cut.trips for n in bits(trip.nodes)}
    own = [n for n in range(len(nodes)) if n not in at_base]
    assert all(nodes[n].side is not Side.BASE for n in own)
    cost = run_client(problem, own, has)
    for trip in cut.trips:
        sent, piece = {*bits(trip.sent)}, sorted({*bits(trip.nodes), *bits(trip.repeated)})
        assert sent <= has, "the client sends what it does not have"
        there = set(sent)
        for n in piece:
            assert nodes[n].side is not Side.CLIENT
            assert there.issuperset(nodes[n].reads), "the base reads what is not there"
            there.update(nodes[n].makes)
        returned = {*bits(trip.returned)}
        assert returned <= there - sent
        has |= returned
        cost += problem.latency_ps + sum(nodes[n].base_ps for n in piece)
        cost += sum(values[v].up_ps for v in sent) + sum(values[v].down_ps for v in returned)
        again = [*bits(trip.again)]
        cost += run_client(problem, again, has)
        assert not again, "what runs on both sides does not find what it reads"
        cost += run_client(problem, own, has)
    assert not own
    assert has.issuperset(problem.outputs)
    return cost


def run_client(problem: SplitProblem, waiting: list[int], has: set[int]) -> int:
    """The cost of the waiting nodes that find what they read; they leave the list."""
    cost = 0
    for n in list(waiting):
        if has.issuperset(problem.nodes[n].reads):
            has.update(problem.nodes[n].makes)
            cost += problem.nodes[n].client_ps
            waiting.remove(n)
    return cost


def test_a_graph_that_is_too_wide_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_cut, "MOST_STATES", 1)
    with pytest.raises(UnsupportedError, match="too many of its nodes can run in any order"):
        exact_cut.exact_cut(random_problem(3))


# -------------------------------------------------------------------------------------- the sides

MIXED = """
graph @block(%x: f32[T, 8], %targets: i64[T]) {
  frozen %w: f32[8, 8] = "w"
  frozen %norm: f32[8] = "norm"
  adapter %a: f32[2, 8] = "a"
  %n: f32[T, 8] = rms_norm(%x, %norm) {eps=1e-05, offset=0.0, round_first=False}
  %y: f32[T, 8] = linear(%n, %w)
  %s: f32[T, 2] = shrink(%n, %a)
  %v: f32[T, 4, 2] = reshape(%y) {shape=(-1, 4, 2)}
  %loss: f32[T] = cross_entropy(%y, %targets)
  return %v, %s, %loss
}
"""


def mixed(tokens: int = 4, linear_only: bool = False) -> SplitGraph:
    (graph,) = parse_graphs(MIXED)
    costs = SplitCosts(
        find_cost_model("H100"), find_cost_model("CPU"), SplitLink.parse("lan"), tokens, 4
    )
    return split_problem(graph, None, costs, linear_only=linear_only, private=("targets",))


def test_each_node_has_its_side() -> None:
    found = mixed()
    sides = {node.name: node.side for node in found.problem.nodes}
    # A view of a value is the value.
    assert sides == {"n": Side.EITHER, "y": Side.BASE, "s": Side.CLIENT, "loss": Side.CLIENT}
    assert found.held == ()
    values = {value.name: value for value in found.problem.values}
    assert values["x"].size_bytes == 4 * 8 * 4
    assert values["x"].up_ps == round(4 * 8 * 4 * 8 / 10e9 * 1e12)
    assert found.problem.latency_ps == 10**9


def test_privacy_leaves_products_alone_to_the_base() -> None:
    sides = {node.name: node.side for node in mixed(linear_only=True).problem.nodes}
    assert sides == {"n": Side.CLIENT, "y": Side.BASE, "s": Side.CLIENT, "loss": Side.CLIENT}


def test_gradients_of_adapters_are_the_clients() -> None:
    (graph,) = parse_graphs(MIXED.replace(", %loss\n", "\n"))
    pair = Prune().run(Differentiate(wrt=("x",)).run(graph.without_dead_code()))
    costs = SplitCosts(
        find_cost_model("H100"), find_cost_model("CPU"), SplitLink.parse("lan"), 4, 4
    )
    found = split_problem(pair.graph, pair.backward, costs).problem
    sides = {node.name: node.side for node in found.nodes}
    assert sides["rest of the model"] is Side.CLIENT
    assert sides["d_a"] is Side.CLIENT
    (product,) = (name for name, side in sides.items() if side is Side.BASE and name != "y")
    assert product.startswith("linear_backward")


def test_a_piece_computes_what_is_returned_of_what_is_sent() -> None:
    (graph,) = parse_graphs(MIXED.replace(", %loss\n", "\n"))
    pair = Prune().run(Differentiate(wrt=("x",)).run(graph.without_dead_code()))
    costs = SplitCosts(
        find_cost_model("H100"), find_cost_model("CPU"), SplitLink.parse("lan"), 4, 4
    )
    cut = cut_graph("block", 1, split_problem(pair.graph, pair.backward, costs))
    assert [piece.is_backward for piece in cut.pieces] == [False, True]
    for whole, piece in zip((pair.graph, pair.backward), cut.pieces, strict=True):
        verify(piece.graph)
        assert all(parameter.role == "frozen" for parameter in piece.graph.parameters)
        returned = piece.graph.outputs
        values = random_values(whole, tokens=4)
        expected = evaluate(whole.replace(outputs=(*piece_inputs(piece), *returned)), values)
        sent = dict(zip(piece_inputs(piece), expected, strict=False))
        given = {p.name: values[p.name] for p in piece.graph.parameters}
        found = evaluate(piece.graph, {**sent, **given})
        for one, other in zip(found, expected[len(sent) :], strict=True):
            torch.testing.assert_close(one, other)


def piece_inputs(piece: Piece) -> tuple[str, ...]:
    return tuple(value.name for value in piece.graph.inputs)


# ---------------------------------------------------------------------------------- known models


@functools.cache
def base_of(model: str) -> tuple[str, Base]:
    source, to_trace = source_of(model)
    kind = str(source.config["model_type"])
    return kind, pipeline(Settings(PlanOptions(), source.name)).base(to_trace)


def gradients(model: str, recipe: object, trains: bool) -> Gradients:
    kind, base = base_of(model)
    recipes = recipes_of(recipe)

    def bypasses(graph: ModelGraph):  # type: ignore[no-untyped-def]
        return adapter_use(graph, recipes, kind, graph.adapter_dtype).bypasses

    passes = pipeline(Settings(PlanOptions(), model, bypasses))
    attached = passes.attach.run(base)
    if not trains:
        return Gradients(attached.serving, None)
    return passes.prune.run(passes.differentiate.run(attached))


def placed(
    recipe: object, link: str, client: str = "CPU", privacy: bool = False, trains: bool = False
) -> Placed:
    given = gradients(LLAMA, recipe, trains)
    devices = find_cost_model("H100"), find_cost_model(client)
    return Place(*devices, SplitLink.parse(link), 1, 64, privacy).run(given)


def products(graph: GraphCut) -> list[str]:
    """The projections of each piece, by their first letters."""
    return [
        "".join(node[0] for node in piece.nodes if node.endswith("_proj")) for piece in graph.pieces
    ]


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("client", ["CPU", "H100"])
@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (QV, ["qkv", "ogud"]),
        ("lora", ["qkv", "o", "gu", "d"]),
        (None, ["qkv", "ogud"]),
        ("ia3", ["qkv", "ogu", "d"]),
        ("prefix", ["qkv", "ogud"]),
        ("houlsby", ["qkv", "o", "gud"]),
    ],
    ids=["q and v", "all-linear", "none", "IA3", "prefix", "Houlsby"],
)
def test_a_llama_layer_takes_the_fewest_round_trips(
    recipe: object, expected: list[str], link: str, client: str
) -> None:
    found = placed(recipe, link, client)
    prologue, block, epilogue = found.decode.graphs
    assert products(block) == expected
    assert block.count == 32
    assert block.fixed.round_trips == 7
    # Nobody is told a user's tokens.
    assert prologue.pieces == ()
    assert len(epilogue.pieces) == 1
    assert found.decode.costs.round_trips == 32 * len(expected) + 1
    assert found.decode.costs.seconds < found.decode.fixed.seconds
    held = [name for graph in found.decode.graphs for name, _ in graph.held]
    assert held == ["model.embed_tokens.weight"]
    private = {"attention", "q_proj_z", "v_proj_s"}
    assert private.isdisjoint(name for piece in block.pieces for name in piece.nodes)
    # Where q and v have adapters, the client makes the norm that they and the base read.
    assert [name for name, _ in block.pieces[0].inputs] in (["input_layernorm"], ["x"])


@pytest.mark.parametrize("link", LINKS)
def test_privacy_sends_linear_operators_alone(link: str) -> None:
    found = placed(QV, link, privacy=True)
    prologue, block, _ = found.decode.graphs
    assert [piece.nodes for piece in block.pieces] == [
        ("q_proj", "k_proj", "v_proj"),
        ("o_proj",),
        ("gate_proj", "up_proj"),
        ("down_proj",),
    ]
    # Tokens are not sent: the client has the embedding.
    assert prologue.pieces == ()
    assert [name for name, _ in prologue.held] == ["model.embed_tokens.weight"]
    assert prologue.held[0][1] == 128_256 * 4096 * 2


def test_backward_makes_again_what_the_base_forgot() -> None:
    found = placed(QV, "lan", trains=True)
    assert found.training is not None
    _, first, block, loss = found.training.graphs
    assert [graph.count for graph in found.training.graphs] == [1, 1, 31, 1]
    q_k_v, mlp, mlp_back, q_k_v_back = block.pieces
    assert [piece.is_backward for piece in block.pieces] == [False, False, True, True]
    assert products(block)[:2] == ["qkv", "ogud"]
    # The client keeps the sum in the middle of the layer, and the base makes the rest of it.
    assert "add" in dict(mlp.outputs)
    assert dict(mlp_back.inputs).keys() == {"add", "d_add_1"}
    assert mlp_back.repeated == ("post_attention_layernorm", "gate_proj", "silu", "up_proj")
    assert "d_reshape_3" in dict(mlp_back.outputs)
    assert q_k_v_back.sent_bytes == 64 * (1024 + 1024 + 3 * 4096) * 2
    assert q_k_v.returned_bytes == 64 * (4096 + 1024 + 1024) * 2
    # The first layer has no gradient of its input.
    assert [piece.is_backward for piece in first.pieces] == [False, False, True]
    assert block.fixed.round_trips == 14
    assert len(loss.pieces) == 2
    assert "loss" in loss.client
    assert "targets" not in {name for piece in loss.pieces for name, _ in piece.inputs}
    assert found.training.costs.round_trips == 3 + 31 * 4 + 2
    assert found.training.costs.seconds * 2 < found.training.fixed.seconds


@pytest.mark.parametrize(
    ("model", "recipe", "trips", "fixed"),
    [
        # Attention and MLP side by side: two calls, or one before attention and one behind it.
        pytest.param("tiiuae/falcon-7b", None, 2, 4, marks=pytest.mark.slow),
        ("openai-community/gpt2-xl", None, 2, 4),
        pytest.param("google/gemma-2-27b", QV, 2, 7, marks=pytest.mark.slow),
        ("facebook/opt-6.7b", QV, 2, 6),
    ],
)
def test_other_families_take_two_round_trips(
    model: str, recipe: object, trips: int, fixed: int
) -> None:
    given = gradients(model, recipe, trains=False)
    link = SplitLink.parse("lan")
    found = Place(find_cost_model("H100"), find_cost_model("A100-80"), link, 1, 64).run(given)
    for block in found.decode.graphs[1:-1]:
        assert block.costs.round_trips == trips
        assert block.fixed.round_trips == fixed
        assert block.costs.seconds < block.fixed.seconds


@pytest.mark.slow
def test_a_piece_that_is_not_linear_cannot_be_private() -> None:
    given = gradients("mistralai/Mixtral-8x7B-v0.1", None, trains=False)
    place = Place(find_cost_model("H100"), find_cost_model("CPU"), SplitLink.parse("lan"), 1, 64)
    assert place.run(given).decode.graphs[1].costs.round_trips == 2
    with pytest.raises(UnsupportedError, match="experts reads frozen weights and is not linear"):
        dataclasses.replace(place, privacy=True).run(given)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("moon", "use shared, lan, wan"),
        ("1", "use shared, lan, wan"),
        ("nan,1", "use shared, lan, wan"),
        ("-1,10", "use ms of at least 0"),
        ("1,0", "Gbit/s above 0"),
    ],
)
def test_a_link_that_is_none_is_refused(text: str, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        SplitLink.parse(text)
