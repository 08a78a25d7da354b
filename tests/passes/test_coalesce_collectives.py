"""Collectives that are joined: which, where, and what the text says."""

from __future__ import annotations

import pytest
import torch

from pcg.ir.parser import parse_graph
from pcg.passes.registry import run_text
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
    assert run_text(NEIGHBOURS, "coalesce_collectives") == JOINED
    assert run_text(JOINED, "coalesce_collectives") == JOINED


@pytest.mark.parametrize("text", APART.values(), ids=APART)
def test_others_stay_apart(text: str) -> None:
    assert run_text(text, "coalesce_collectives") == text


def test_numbers_and_bytes_stay_the_same() -> None:
    graph, joined = parse_graph(NEIGHBOURS), parse_graph(JOINED)
    x = torch.randn(2, 5, 8)

    def on_rank(ranks: ThreadRanks) -> None:
        batch = Spread(ranks)
        apart = evaluate(graph, {"x": x[ranks.rank]}, batch)
        sent, messages = dict(ranks.moved_bytes), dict(ranks.messages)
        together = evaluate(joined, {"x": x[ranks.rank]}, batch)
        assert torch.equal(apart[0], together[0])
        assert ranks.moved_bytes == {kind: 2 * size for kind, size in sent.items()}
        assert messages["all_gather"] == 2
        assert ranks.messages["all_gather"] == 3

    run_ranks(2, on_rank)
