"""What runs beside a collective: which nodes move, which stay, and what is written of it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pcg.codegen.emit import emit_function
from pcg.codegen.program_functions import Function
from pcg.ir.analysis.builder import Builder
from pcg.ir.analysis.dataflow import collective_of, waits
from pcg.ir.analysis.verifier import verify
from pcg.ir.graph import Graph
from pcg.ir.parser import parse_graph
from pcg.ir.program.saved_memory import transient
from pcg.ir.types import TOKENS, tensor
from pcg.passes.graphs.collectives import MORE, Overlap
from pcg.passes.registry import run_text

BACKWARD = """\
graph @g(%dy: f32[T, 8], %s: f32[T, 8], %x: f32[T, 8]) {
  frozen %w: f32[8, 8] = "w"
  frozen %v: f32[64, 8] = "v"
  %dw: f32[8, 8] = outer(%dy, %s)
  %dx: f32[T, 8] = linear_backward(%dy, %w)
  %sum: f32[T, 8] = all_reduce(%dx)
  %e: f32[T, 64] = linear(%sum, %v)
  %dv: f32[8, 8] = outer(%x, %s)
  return %e, %dw, %dv
}
"""
BESIDE = """\
graph @g(%dy: f32[T, 8], %s: f32[T, 8], %x: f32[T, 8]) {
  frozen %w: f32[8, 8] = "w"
  frozen %v: f32[64, 8] = "v"
  %dx: f32[T, 8] = linear_backward(%dy, %w)
  %sum: f32[T, 8] = all_reduce(%dx)
  %dw: f32[8, 8] = outer(%dy, %s)
  %dv: f32[8, 8] = outer(%x, %s)
  %e: f32[T, 64] = linear(%sum, %v)
  return %e, %dw, %dv
}
"""
EMITTED = """\
    # layer
    dx = K.linear_backward(dy, w.w_)
    sum = K.all_reduce.begin(dx, batch)
    del dx
    dw = K.outer(dy, s)
    del dy
    dv = K.outer(x, s)
    del s, x
    sum = sum()
    e = K.linear(sum, w.v)
    del sum
    return e, dw, dv
"""
STAY = {
    "nothing is free": """\
graph @g(%x: f32[T, 8]) {
  %a: f32[T, 8] = exp(%x)
  %b: f32[T, 8] = all_reduce(%a)
  %c: f32[T, 8] = neg(%b)
  return %c
}
""",
    "a large value would be there longer": """\
graph @g(%x: f32[T, 8], %y: f32[T, 64]) {
  %small: f32[T, 1] = mean(%y) {dim=-1, keepdim=True}
  %a: f32[T, 8] = mul(%x, %x)
  %b: f32[T, 8] = all_reduce(%a)
  %c: f32[T, 8] = mul(%b, %small)
  return %c
}
""",
}


def test_what_need_not_wait_runs_beside_it() -> None:
    assert run_text(BACKWARD, "overlap") == BESIDE
    assert run_text(BESIDE, "overlap") == BESIDE


def test_it_is_begun_and_waited_for() -> None:
    source = emit_function(Function(parse_graph(BESIDE), "g", "It.", free=True))
    assert source.endswith(EMITTED)


def test_with_nothing_beside_it_it_is_one_statement() -> None:
    source = emit_function(Function(parse_graph(STAY["nothing is free"]), "g", "It.", free=True))
    assert "    b = K.all_reduce(a_, batch)\n    del a_\n    c = -b\n" in source


def test_several_tensors_in_one_message_are_waited_for_together() -> None:
    graph = parse_graph("""\
graph @g(%x: f32[T, 8], %y: f32[T, 4]) {
  %p: f32[T, 8], %q: f32[T, 4] = all_reduces(%x, %y)
  %c: f32[T, 8] = exp(%x)
  %d: f32[T, 4] = exp(%q)
  return %c, %d
}
""")
    source = emit_function(Function(graph, "g", "It.", free=True))
    assert source.endswith("""\
    p = K.all_reduces.begin([x, y], batch)
    del y
    c = torch.exp(x)
    del x
    p, q = p()
    d = torch.exp(q)
    del p, q
    return c, d
""")


@pytest.mark.parametrize("text", STAY.values(), ids=STAY)
def test_others_stay_as_they_are(text: str) -> None:
    assert run_text(text, "overlap") == text


def test_a_gather_begins_before_the_product_that_is_not_of_it() -> None:
    """And no sooner than it need for that."""
    graph = parse_graph("""\
graph @g(%x: f32[T, 8], %y: f32[T, 8192]) {
  frozen %w: f32[8, 8192] = "w"
  %a: f32[T, 8192] = exp(%y)
  %b: f32[T, 8192] = neg(%a)
  %c: f32[T, 8] = linear(%b, %w)
  %d: f32[T, 16] = all_gather(%x) {degree=2, dim=-1}
  %e: f32[T, 8] = slice(%d) {dim=-1, start=0, stop=8}
  %f: f32[T, 8] = add(%c, %e)
  return %f
}
""")
    names = [node.name for node in Overlap().run(graph).nodes]
    assert names == ["a", "b", "d", "c", "e", "f"]


def test_memory_while_a_collective_goes_on() -> None:
    """A gather's parts are held until all have come, what is summed is a copy."""
    text = """\
graph @g(%x: f32[T, 4], %y: f32[T, 32]) {
  %x2: f32[T, 4] = exp(%x)
  %a: f32[T, WIDTH] = COLLECTIVE
  %b: f32[T, 32] = exp(%y)
  %c: f32[T, WIDTH] = exp(%a)
  return %b, %c
}
"""

    def most(width: int, collective: str) -> int:
        graph = parse_graph(text.replace("WIDTH", str(width)).replace("COLLECTIVE", collective))
        assert waits(graph.nodes) == {1: 3}
        return transient(graph, 1, 1).per_token

    # exp(y): y, what it makes, what will have come, and of a gather what is sent
    assert most(8, "all_gather(%x2) {degree=2, dim=-1}") == 4 * (32 + 32 + 8 + 4)
    assert most(4, "all_reduce(%x2)") == 4 * (32 + 32 + 4)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Chains of elementwise operators, products' gradients and collectives that read each other."""
    builder = Builder("g")
    wide = [builder.input(f"x{i}", tensor("f32", TOKENS, 8)) for i in range(2)]
    results = []
    for _ in range(draw(st.integers(3, 16))):
        op = draw(st.sampled_from(["add", "all_reduce", "exp", "outer", "reshape"]))
        one, other = draw(st.sampled_from(wide)), draw(st.sampled_from(wide))
        if op == "outer":
            results.append(builder.add(op, [one, other]))
        elif op == "reshape":
            wide.append(builder.add(op, [one], shape=(-1, 8)))
        else:
            wide.append(builder.add(op, [one, other] if op == "add" else [one]))
    return builder.build([wide[-1], *dict.fromkeys(results)])


@settings(max_examples=40)
@given(graphs())
def test_collectives_keep_their_order_and_memory_its_bound(graph: Graph) -> None:
    found = Overlap().run(graph)
    verify(found)
    assert sorted(n.name for n in found.nodes) == sorted(n.name for n in graph.nodes)
    before, after = (
        [node.name for node in one.nodes if collective_of(node)] for one in (graph, found)
    )
    assert before == after
    per_token = transient(found, 2**24, 1).per_token
    assert per_token <= (1 + MORE) * transient(graph, 2**24, 1).per_token
    source = emit_function(Function(found, "g", "It.", free=True))
    assert source.count(".begin(") == len(waits(found.nodes))
