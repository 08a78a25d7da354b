"""The searched cut: equal to the undivided executor, as predicted, and safe for the base."""

import dataclasses
import linecache

import pytest
import torch

import pcg
from pcg.compiler import compile_program
from pcg.explain.explain_split import explain_split
from pcg.options import SplitLink
from pcg.parallel.costs.own_rates import OwnRates
from pcg.passes.placement import exact_cut
from pcg.runtime.training.runner import training_runner
from pcg.split.client.connect import searched_cut
from pcg.split.messages import VERSION, Message
from tests.support.families import BY_NAME
from tests.support.in_process import InProcessEndpoint
from tests.support.split_base import EXAMPLES, KEY, PROMPTS, make_base, running_base, undivided

QV = pcg.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])


def test_a_slow_base_makes_no_product_again():
    config = BY_NAME["llama3"].config(1)
    slow = OwnRates({"f32": 2.0**30}, 2.0**33)
    counts = []
    for rates in (None, slow):
        place, report = searched_cut(
            SplitLink.parse("lan"), "CPU", torch.device("cpu"), (rates, rates)
        )
        compile_program(config, {"x": QV}, backend="torch", place=place)
        (layer,) = [one.cut for one in report.layers if one.trains]
        repeated = [name for piece in layer.pieces for name in piece.repeated]
        counts.append(sum(name.endswith("_proj") for name in repeated))
    assert counts == [2, 0]  # gate and up


def test_what_crosses_is_what_was_predicted():
    config = BY_NAME["llama3"].config(2)
    whole = undivided("llama3", 2)
    predicted = explain_split(
        config, QV, seq=9, dtype="float32", link="lan", client="CPU", base="CPU"
    )
    (example, *_) = EXAMPLES
    with running_base(whole) as base, base.connect(peft={"x": QV}, link="lan") as split:
        assert all(one.cut is not None for one in split.cut.layers)
        layer = split.cut.layers[-1].cut
        assert layer.costs.round_trips < layer.fixed.round_trips
        runner = training_runner(split.state, split.state.adapter("x"))

        def step():
            runner.forward_backward([example], 8)

        def prefill():
            split.logits(list(example.ids), adapter="x")

        def crossed(run):
            run()  # the base is told its graphs
            before = dataclasses.replace(split.caller.moved)
            run()
            after = split.caller.moved
            return (
                after.calls - before.calls,
                after.sent_bytes - before.sent_bytes,
                after.received_bytes - before.received_bytes,
            )

        assert crossed(prefill) == costs(predicted.steps["prefill"], 9, 9)
        # The last token has no target, and its logits are not computed.
        assert crossed(step) == costs(predicted.steps["training"], 9, 8)
        assert predicted.steps["training"].costs.round_trips == (2 * 2 + 1) + (1 + 2 + 1)


def costs(step, tokens, rows):
    """Round trips and bytes of a step, whose last graph has so many rows."""
    assert step.tokens == tokens
    trips, sent, received = 0, 0, 0
    for graph in step.graphs:
        own = rows if graph is step.graphs[-1] else tokens
        trips += graph.count * graph.costs.round_trips
        sent += graph.count * graph.costs.sent_bytes * own // tokens
        received += graph.count * graph.costs.returned_bytes * own // tokens
    return trips, sent, received


def test_a_cut_that_cannot_be_searched_is_linear_and_says_why(whole, monkeypatch):
    monkeypatch.setattr(exact_cut, "MOST_STATES", 1)
    with running_base(whole) as base, base.connect(link="lan") as split:
        assert "linear cut, as a graph of 16 nodes" in str(split.cut)
        assert len(base.loop.base.graphs) == 0
        expected = whole.generate(PROMPTS, max_new_tokens=3, temperature=0)
        found = split.generate(PROMPTS, max_new_tokens=3, temperature=0)
        assert [one.token_ids for one in found] == [one.token_ids for one in expected]


def test_noise_leaves_linear_operators_alone_to_the_base(whole):
    with running_base(whole) as base, base.connect(privacy="base") as split:
        assert str(split.cut) == "linear cut: noise hides linear operators alone"
        split.logits(PROMPTS[0])
        assert len(base.loop.base.graphs) == 0


def test_a_base_that_forgot_its_graphs_is_told_again(whole):
    with running_base(whole) as base, base.connect(link="lan") as split:
        expected = split.logits(PROMPTS[0])
        graphs = base.loop.base.graphs
        assert len(graphs) == 2
        for client in list(base.loop._clients):
            graphs.forget(client)
        assert len(graphs) == 0
        assert torch.equal(split.logits(PROMPTS[0]), expected)
        assert len(graphs) == 2
    assert len(graphs) == 0  # nobody is left who has defined them


# ------------------------------------------------------------------------------- what bases run

SIZE = 64
Q = "model.layers.{layer}.self_attn.q_proj.weight"
GOOD = f"""graph @piece(%v0: f32[T, 64]) {{
  frozen %p0: f32[64, 64] = "{Q}"
  %v1: f32[T, 64] = linear(%v0, %p0)
  %v2: f32[T, 64] = silu(%v1)
  return %v2
}}"""


@pytest.fixture
def base(whole):
    """A base of its own for each test: a graph that is refused makes its key wait."""
    return make_base(whole)


def joined(base):
    client, replies = base.endpoint.join()
    hello = Message("hello", 1, {"version": VERSION, "key": KEY})
    assert ask(base, (client, replies), hello).op == "reply"
    return client, replies


def ask(base, client, message):
    assert isinstance(base.endpoint, InProcessEndpoint)
    base.endpoint.ask(client[0], message)
    while client[1].empty():
        base.loop.step(0.0)
    reply = client[1].get(timeout=60)
    return reply


HOSTILE = {
    "not an operator": ("silu(%v1)", "attention(%v1, %v1, %v1)", "no operator that a base runs"),
    "an adapter": ("frozen", "adapter", "a base has frozen weights alone"),
    "another weight": (Q, "model.secret", "is no weight of this base"),
    "another shape": ("f32[64, 64]", "f32[32, 64]", "this is no piece"),
    "algebra": ("f32[T, 64] = linear", "f32[T, 2**16**16] = linear", "types such as"),
    "a sum of tokens": ("f32[T, 64] = silu", "f32[T + 4, 64] = silu", "types such as"),
    "a wide value": (
        "%v2: f32[T, 64] = silu(%v1)",
        "%r: f32[T, 64, 1] = reshape(%v1) {shape=(-1, 64, 1)}\n"
        "  %v2: f32[T, 64, 1000000] = expand(%r) {shape=(-1, 64, 1000000)}",
        "numbers a token, more than",
    ),
    "a word that is code": (
        "silu(%v1)",
        'gelu(%v1) {approximate="none\') or exit("}',
        "use numbers or words",
    ),
    "a scope that is code": (
        "silu(%v1)",
        'silu(%v1) @"x\\r    exit()"',
        "its names, and no scopes",
    ),
    "a name of its own": ("%v1", "%torch", "its names, and no scopes"),
    "a weight that is code": (Q, "x\\n    exit()", "is no weight of this base"),
    "a weight as output": ("return %v2", "return %p0", "returns values that its nodes make"),
    "an input as output": ("return %v2", "return %v0", "returns values that its nodes make"),
    "a matrix of weights": (
        "%v2: f32[T, 64] = silu(%v1)",
        "%m: f32[64, 64] = silu(%p0)\n  %v2: f32[T, 64] = silu(%v1)",
        "weights make vectors alone",
    ),
    "products for ever": (
        "%v2: f32[T, 64] = silu(%v1)",
        "%a: f32[T, 64] = linear(%v1, %p0)\n  %v2: f32[T, 64] = linear(%a, %p0)",
        "2 products of a kind by a matrix at most",
    ),
    "no text": (GOOD, "graph", "this is no piece"),
    "a long text": ("return %v2", " " * 2**16 + "return %v2", "text of 65536 characters"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_graph_that_may_not_run_is_refused(base, name):
    old, new, message = HOSTILE[name]
    text = GOOD.replace(old, new)
    assert text != GOOD
    client = joined(base)
    reply = ask(base, client, Message("define", 2, {"text": text}))
    if reply.op == "reply":
        piece = f"graph:{reply.fields['digest']}@0"
        run = Message("run", 3, {"piece": piece}, (torch.ones(2, SIZE),))
        reply = ask(base, client, run)
    assert reply.op == "error"
    assert message in reply.fields["error"]
    assert base.loop.waiting == 0


@pytest.mark.parametrize(
    ("tensors", "layer", "message"),
    [
        ((torch.ones(2, 32),), 0, "takes f32[T, 64]"),
        ((torch.ones(0, 64),), 0, "takes f32[T, 64]"),
        ((torch.ones(2, 64), torch.ones(2, 64)), 0, "takes f32[T, 64]"),
        ((torch.ones(2, 64).double(),), 0, "not torch.float64"),
        ((torch.ones(2, 64),), 7, "model.layers.7.self_attn.q_proj.weight' is no weight"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(base, tensors, layer, message):
    client = joined(base)
    digest = ask(base, client, Message("define", 2, {"text": GOOD})).fields["digest"]
    reply = ask(base, client, Message("run", 3, {"piece": f"graph:{digest}@{layer}"}, tensors))
    assert message in reply.fields["error"]


def test_a_graph_is_of_those_who_defined_it(base):
    owner, other = joined(base), joined(base)
    digest = ask(base, owner, Message("define", 2, {"text": GOOD})).fields["digest"]
    run = Message("run", 3, {"piece": f"graph:{digest}@0"}, (torch.ones(2, SIZE),))
    assert "was not defined" in ask(base, other, run).fields["error"]


def test_graphs_of_clients_that_left_leave_nothing_behind(base):
    before = len(base.loop.base.graphs), len(linecache.cache)
    for number in range(3):
        client = joined(base)
        text = GOOD.replace("silu(%v1)", f"mul(%v1) {{scalar={number}.5}}")
        assert ask(base, client, Message("define", 2, {"text": text})).op == "reply"
        base.endpoint.ask(client[0], Message("bye", 3))
        base.loop.step(0.0)
    assert (len(base.loop.base.graphs), len(linecache.cache)) == before


def test_memory_of_a_request_is_bounded(whole):
    base = make_base(whole, max_piece_mib=1)
    client = joined(base)
    digest = ask(base, client, Message("define", 2, {"text": GOOD})).fields["digest"]
    values, kernels = 3 * 64 * 4, 4 * 64 * 4
    fits = 2**20 // (values + kernels)
    for tokens, op in ((fits, "reply"), (fits + 1, "error")):
        run = Message("run", 3, {"piece": f"graph:{digest}@0"}, (torch.ones(tokens, SIZE),))
        reply = ask(base, client, run)
        assert reply.op == op
    assert f"send {fits:,} tokens at most" in reply.fields["error"]


def test_one_graph_of_several_clients_is_one_batch(base):
    clients = [joined(base) for _ in range(3)]
    before = dataclasses.replace(base.loop.counts)
    x = [torch.randn(2 + n, SIZE, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    for client in clients:
        digest = ask(base, client, Message("define", 2, {"text": GOOD})).fields["digest"]
    for client, one in zip(clients, x, strict=True):
        run = Message("run", 3, {"piece": f"graph:{digest}@0"}, (one,))
        base.endpoint.ask(client[0], run)
    base.loop.step(0.0)
    weight = base.loop.base.multiplied[Q.format(layer=0)]
    for client, one in zip(clients, x, strict=True):
        while client[1].empty():
            base.loop.step(0.0)
        (found,) = client[1].get(timeout=60).tensors
        expected = torch.nn.functional.silu(one @ weight.t())
        torch.testing.assert_close(found, expected)
    counts = base.loop.counts
    assert (counts.requests - before.requests, counts.batches - before.batches) == (3, 1)
