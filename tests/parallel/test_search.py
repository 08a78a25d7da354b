"""The search for bypass networks: exact, complete, right in numbers, and true in bytes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest

from pcg.errors import TypeCheckError
from pcg.explain.explain import explain
from pcg.ir.analysis.dataflow import trained
from pcg.ir.layouts import PRE_REDUCE, REPLICATED, WHOLE, Sharding
from pcg.ir.program.program import ModelGraph
from pcg.parallel.base_plan import COLUMN, ROW
from pcg.parallel.costs.layer_costs import DeviceCosts, ring_bytes
from pcg.parallel.costs.work import size_bytes
from pcg.parallel.parallel_plan import Constraints
from pcg.parallel.planner import Planner
from pcg.parallel.search import Candidate, Search, SearchResult
from pcg.parallel.strategy_names import BypassSite
from pcg.passes.attach import Bypasses
from pcg.peft.vera import VeraBypass
from tests.support.bypasses import lora
from tests.support.families import BY_NAME
from tests.support.parallelized import RANK, Machine, attached, attached_to, costs, search_layer
from tests.support.parameters import mostly_slow
from tests.support.sharded import LENGTHS, check_candidates, errors

PAPERS = ("FlexLLM 1", "FlexLLM 2", "FlexLLM 3", "FlexLLM 4", "Punica", "S-LoRA")
OTHERS = ("held fully sharded, weights gathered", "held fully replicated")


@cache
def searched(name: str, degree: int = 2) -> tuple[Search, SearchResult]:
    state = attached(name, "float64")
    assert state.training is not None
    search = search_layer(state.training.blocks[0], state.base.blocks[0], degree, costs(degree))
    return search, search.find()


def test_a_site_lists_every_way_of_the_papers() -> None:
    _, found = searched("llama3")
    assert [choice.site.name.rpartition(".")[2] for choice in found.sites] == [
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    ]
    for choice in found.sites:
        strategies = [candidate.strategy for candidate in choice.candidates]
        assert all(any(paper in name for name in strategies) for paper in PAPERS)
        assert all(any(other in name for name in strategies) for other in OTHERS)
        assert len(strategies) == 36  # whole, copies, 2 parts, or these gathered, of A and of B
        bills = [candidate.added.value for candidate in choice.candidates]
        assert bills == sorted(bills)
        assert choice.chosen.added.value == pytest.approx(bills[0])


@pytest.mark.parametrize("name", mostly_slow(["llama3", "falcon-7b", "gemma2"], "llama3"))
def test_nothing_costs_less(name: str) -> None:
    """Without dropping states, and over all ways of a site alone."""

    class Exhaustive(Planner):
        def _undominated(self, states: Iterable[Any], fixed: Constraints) -> list[Any]:
            return list(states)

    search, _ = searched(name)
    plan = search.planner.plan(Constraints(search.layouts, search.base))
    every = Exhaustive(search.graph, 2, search.planner.costs)
    for site in search.sites[:4]:
        others = {n: h for n, h in plan.held.items() if n not in site.weights}
        rules = {n: c.rule for n, c in plan.nodes.items() if n not in site.nodes}
        fixed = Constraints({**search.layouts, **others}, rules)
        assert every.plan(fixed).cost == pytest.approx(plan.cost, rel=1e-12)


@pytest.mark.parametrize("alpha", [1e-5, 1e-7, 1e-9])
def test_nothing_costs_less_with_neighbours_in_one_message(alpha: float) -> None:
    """Over all layouts of the weights of two sites of one input, together."""

    def bypasses(base: ModelGraph) -> Bypasses:
        sites = [site for site in base.linear_sites() if site.endswith(("q_proj", "k_proj"))]
        return lora(dict.fromkeys(sites, RANK), dtype="f64")

    state = attached_to(BY_NAME["llama3"].config(2), bypasses, "float64")
    assert state.training is not None
    machine = DeviceCosts(Machine(alpha), 2, sum(LENGTHS), 1024)
    search = search_layer(state.training.blocks[0], state.base.blocks[0], 2, machine)
    weights = [name for site in search.sites for name in site.weights]
    least = None
    for held in itertools.product((WHOLE, REPLICATED, COLUMN, ROW), repeat=len(weights)):
        try:
            plan = search.hold(dict(zip(weights, held, strict=True)))
        except TypeCheckError:
            continue
        cost = search.costs.of(plan).value
        least = cost if least is None else min(cost, least)
    assert search.costs.of(search.plan()).value == pytest.approx(least, rel=1e-9)


SITES = {"q_proj", "down_proj"}
"""The others in the slow run."""


@pytest.mark.parametrize(
    ("name", "site"),
    [
        pytest.param(
            name,
            site,
            marks=() if name == "llama3" and site in SITES else pytest.mark.slow,
        )
        for name, sites in {
            "llama3": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
            "qwen2": ("q_proj", "o_proj", "down_proj"),
            "opt": ("q_proj", "out_proj", "fc1", "fc2"),
            "gpt2": ("c_attn", "c_proj", "c_fc"),
            "falcon-7b": ("query_key_value", "dense"),
            "gemma2": ("q_proj", "o_proj", "down_proj"),
        }.items()
        for site in sites
    ],
)
@pytest.mark.parametrize("degree", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_candidate_is_right_and_sends_what_it_says(name: str, site: str, degree: int) -> None:
    check_candidates(*searched(name, degree), site)


@pytest.mark.parametrize("name", ["llama3", "gpt2", "falcon-7b"])
def test_a_name_says_what_runs(name: str) -> None:
    """FlexLLM's first sends nothing, and its second does, whatever layouts weights are held in."""
    _, found = searched(name)
    checked = 0
    for choice in found.sites:
        if choice.site.is_row is not False:
            continue
        names = {candidate.strategy: candidate for candidate in choice.candidates}
        assert len(names) == len(choice.candidates)
        sent = {n: c.added.forward_bytes + c.added.backward_bytes for n, c in names.items()}
        # Copies of a weight send nothing in a batch, whoever reads a part of them.
        own = ("FlexLLM 1, Punica: replicate A, partition B", "; held fully replicated")
        first = [size for n, size in sent.items() if n in (own[0], own[0] + own[1])]
        second = [size for n, size in sent.items() if n.startswith("FlexLLM 2")]
        assert all(size == 0 for size in first)
        assert all(size > 0 for size in second)
        checked += len(second)
    assert checked


def by_name(found: SearchResult, site: str) -> dict[str, Candidate]:
    (choice,) = (choice for choice in found.sites if choice.site.name.endswith(site))
    return {candidate.strategy: candidate for candidate in choice.candidates}


def test_s_loras_bytes() -> None:
    """5 (N - 1) B r / N for attention, forward (S-LoRA §6.2); B is tokens."""
    degree = 4
    _, found = searched("llama2", degree)
    total = 0
    for site in ("q_proj", "k_proj", "v_proj", "o_proj"):
        (slora,) = (
            c for name, c in by_name(found, site).items() if "S-LoRA" in name and ";" not in name
        )
        total += slora.added.forward_bytes
        assert slora.added.step_bytes == 0
    assert total == 5 * (degree - 1) * sum(LENGTHS) * RANK * 8 // degree


def test_a_search_names_what_each_site_is() -> None:
    search, _ = searched("llama3")
    assert [site.is_row for site in search.sites] == [False] * 3 + [True] + [False] * 2 + [True]
    assert all(isinstance(site, BypassSite) and len(site.weights) == 2 for site in search.sites)


def test_what_is_best_changes_with_tokens() -> None:
    """Few tokens: no messages. Very many: to compute what is parted once is worth them."""
    state = attached("llama3")
    assert state.training is not None
    layer, base = state.training.blocks[0], state.base.blocks[0]
    names, messages = [], []
    for tokens in (1, 10**7):
        search = search_layer(layer, base, 2, DeviceCosts(Machine(1e-5, 1e15), 2, tokens, 1024))
        found = search.find()
        names.append(found.sites[0].chosen.strategy)
        bill = found.sites[0].chosen.added
        messages.append(bill.forward_messages + bill.backward_messages)
    assert messages[0] == 0  # but what goes with the base's
    assert names[0] != names[1]


def test_batches_of_an_optimizer_step_share_the_sums_of_gradients() -> None:
    """A copy costs a batch its share, so that copies win where a step has many batches."""
    state = attached("llama3")
    assert state.training is not None
    pair = state.training.blocks[0], state.base.blocks[0]
    machine = Machine(alpha=0.0, link=1e6)
    found = {}
    for batches in (1, 4, 4096):
        search = search_layer(*pair, 2, DeviceCosts(machine, 2, 1, 1, batches))
        found[batches] = {choice.site.name: choice for choice in search.find().sites}
    summed = 0
    for site, once in found[1].items():
        shared = {candidate.key: candidate.added for candidate in found[4][site].candidates}
        for candidate in once.candidates:
            if candidate.strategy.endswith("fully replicated"):
                bytes_summed = candidate.added.step_bytes
                spared = candidate.added.value - shared[candidate.key].value
                assert spared == pytest.approx(0.75 * bytes_summed / machine.link)
                assert shared[candidate.key].step_bytes == bytes_summed
                summed += bytes_summed > 0
        copies = [found[batches][site].chosen.added.step_bytes for batches in (1, 4096)]
        assert copies[0] <= copies[1]
    assert summed == len(found[1])
    assert any(found[1][s].chosen.key != found[4096][s].chosen.key for s in found[1])


def test_a_type_error_names_operator_layouts_and_ways() -> None:
    search, found = searched("llama3")
    site = found.sites[0].site
    rule = Sharding((WHOLE, WHOLE, PRE_REDUCE), (WHOLE,))
    fixed = Constraints(search.layouts, {**search.base, site.nodes[-1]: rule})
    with pytest.raises(TypeCheckError, match=r"'expand_add' \(in self_attn.q_proj\).*it takes "):
        search.planner.plan(fixed)


def test_serving_pays_for_no_backward() -> None:
    """What it sends is what its graph sends forward, and every second is one of forward."""
    state = attached("llama3", "float64")
    layers = state.serving.blocks[0], state.base.blocks[0]
    search = search_layer(*layers, 2, costs(2), trains=False)
    plan = search.plan()
    bill = search.costs.of(plan)
    assert (bill.backward_bytes, bill.step_bytes) == (0, 0)
    assert bill.forward_bytes > 0
    seconds = sum(
        search.planner.costs.node(node, search.graph, choice.rule, (False,) * len(node.inputs))
        + sum(
            search.planner.costs.send(step.forward, search.graph.types[name])
            for name, steps in choice.reshards
            for step in steps
            if step.forward
        )
        for node in search.graph.nodes
        for choice in [plan.nodes[node.name]]
    )
    assert plan.cost == pytest.approx(seconds, rel=1e-12)
    training = search_layer(*layers, 2, costs(2))
    assert training.costs.of(training.plan()).backward_bytes > 0


def test_what_is_shared_and_not_trained_costs_no_sum() -> None:
    """VeRA's matrices: their copies have no gradients, and so no message either."""

    def bypasses(base: ModelGraph) -> Bypasses:
        sites = (site for site in base.linear_sites() if "{layer}" in site)
        return Bypasses(dict.fromkeys(sites, (VeraBypass(RANK),)))

    state = attached_to(BY_NAME["llama3"].config(2), bypasses, "float32")
    assert state.training is not None
    block = state.training.blocks[0]
    vectors = set(trained(block))
    adapters = {p.name for p in block.parameters if p.role == "adapter"}
    assert adapters - vectors == {"vera_A", "vera_B"}
    search = search_layer(block, state.base.blocks[0], 2, costs(2))
    plan = search.hold(dict.fromkeys(adapters, REPLICATED))
    sizes = (size_bytes(block.types[name], 1) for name in vectors)
    bill = search.costs.of(plan)
    assert bill.step_bytes == sum(ring_bytes("all_reduce", size, 2) for size in sizes)
    sent: dict[str, int] = {}
    assert max(errors(search.graph, 2, plan, sent).values()) < 1e-5
    assert sum(sent.values()) == bill.forward_bytes + bill.backward_bytes


def test_every_reader_gathers_or_none() -> None:
    """DoRA reads A and B twice: in the bypass, and for the length of the weights."""

    def bypasses(base: ModelGraph) -> Bypasses:
        sites = [site for site in base.linear_sites() if site.endswith(("q_proj", "down_proj"))]
        return lora(dict.fromkeys(sites, RANK), use_dora=True, dtype="f64")

    state = attached_to(BY_NAME["llama3"].config(2), bypasses, "float64")
    assert state.training is not None
    search = search_layer(state.training.blocks[0], state.base.blocks[0], 2, costs(2))
    best = search.plan()
    seen = set()
    for site in search.sites:
        a, b = (n for n in site.weights if n.endswith(("lora_A", "lora_B")))
        assert all(len(search.graph.consumers[name]) == 2 for name in (a, b))
        for held, is_gathered in itertools.product((COLUMN, ROW), (False, True)):
            for name in (a, b):
                gathered = frozenset([name] if is_gathered else ())
                try:
                    plan = search.force(best, site, {name: held}, gathered)
                except TypeCheckError:
                    continue
                nodes = search.graph.consumers[name]
                read = {
                    dict(zip(node.inputs, plan.nodes[node.name].rule.inputs, strict=True))[name]
                    for node in nodes
                }
                seen.add(is_gathered)
                assert held not in read if is_gathered else read == {held}
                assert max(errors(search.graph, 2, plan).values()) < 1e-5
    assert seen == {False, True}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen/Qwen3.5-9B", "deepseek-ai/DeepSeek-V3"])
def test_layers_of_many_live_values_are_planned(name: str) -> None:
    """Delta rules and latent attention have more states than an exact search can visit."""
    four, two = (explain(name, peft="lora", tp=tp) for tp in (4, 2))
    assert four.memory_bytes["total"] < two.memory_bytes["total"]
