"""Collectives that are joined: which, where, and what the text says."""

from __future__ import annotations

import pytest
import torch

from pcg.ir.parser import parse_graph
from pcg.ir.verifier import verify
from pcg.passes.sharding.coalesce_collectives import CoalesceCollectives
from tests.support.evaluate import evaluate
from tests.support.spread import Spread
from tests.support.threads import ThreadRanks, run_ranks

NEIGHBOURS = """\
graph @g(%x: f32[T, 8]) {
  %a: f32[T, 8] = exp(%x)
  %b: f32[T, 16] = all_gather(%a) {degree=2, dim=-1}
  %c: f32[T, 16] = neg(%b)
  %d: f32[T, 8] = sin(%x)
  %e: f32[T, 16] = all_gather(%d) {degree=2, dim=-1}
  %f: f32[T, 16] = add(%c, %e)
  return %f
}
"""
JOINED = """\
graph @g(%x: f32[T, 8]) {
  %a: f32[T, 8] = exp(%x)
  %d: f32[T, 8] = sin(%x)
  %b: f32[T, 16], %e: f32[T, 16] = all_gathers(%a, %d) {degree=2, dims=(-1, -1)}
  %c: f32[T, 16] = neg(%b)
  %f: f32[T, 16] = add(%c, %e)
  return %f
}
"""
APART = {
    "one reads what came of the other": """\
graph @g(%x: f32[T, 8]) {
  %a: f32[T, 16] = all_gather(%x) {degree=2, dim=-1}
  %b: f32[T, 16] = neg(%a)
  %c: f32[T, 32] = all_gather(%b) {degree=2, dim=-1}
  return %c
}
""",
    "dtypes differ": """\
graph @g(%x: f32[T, 8], %y: bf16[T, 8]) {
  %a: f32[T, 8] = all_reduce(%x)
  %b: bf16[T, 8] = all_reduce(%y)
  return %a, %b
}
""",
    "another is between": """\
graph @g(%x: f32[T, 8], %y: f32[T, 8]) {
  %a: f32[T, 8] = all_reduce(%x)
  %b: f32[T, 16] = all_gather(%x) {degree=2, dim=-1}
  %c: f32[T, 8] = all_reduce(%y)
  return %a, %b, %c
}
""",
}


def test_neighbours_are_one_message_where_the_last_of_them_stood() -> None:
    found = CoalesceCollectives().run(parse_graph(NEIGHBOURS))
    verify(found)
    assert found == parse_graph(JOINED)
    assert CoalesceCollectives().run(found) == found


@pytest.mark.parametrize("text", APART.values(), ids=APART)
def test_others_stay_apart(text: str) -> None:
    graph = parse_graph(text)
    assert CoalesceCollectives().run(graph) == graph


def test_numbers_and_bytes_stay_the_same() -> None:
    graph = parse_graph(NEIGHBOURS)
    x = torch.randn(2, 5, 8)

    def on_rank(ranks: ThreadRanks) -> None:
        batch = Spread(ranks)
        apart = evaluate(graph, {"x": x[ranks.rank]}, batch)
        sent, messages = dict(ranks.moved_bytes), dict(ranks.messages)
        together = evaluate(CoalesceCollectives().run(graph), {"x": x[ranks.rank]}, batch)
        assert torch.equal(apart[0], together[0])
        assert ranks.moved_bytes == {kind: 2 * size for kind, size in sent.items()}
        assert messages["all_gather"] == 2
        assert ranks.messages["all_gather"] == 3

    run_ranks(2, on_rank)
