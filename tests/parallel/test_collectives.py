"""Collectives of a rank's graph, and their gradients, against what they mean on the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pcg.ir.analysis.builder import Builder
from pcg.ir.analysis.verifier import verify
from pcg.ir.graph import Attribute, Graph
from pcg.ir.layouts import PRE_REDUCE, REPLICATED, WHOLE, Layout, dual, partitioned
from pcg.ir.types import TOKENS, part_of_tokens, tensor
from pcg.kernels.torch import ops as torch_ops
from pcg.passes.graphs.differentiate import Differentiate
from tests.support.evaluate import evaluate
from tests.support.held import held, joined, seeded
from tests.support.spread import Spread
from tests.support.threads import ThreadRanks, run_ranks

DEGREE = 2
PART = partitioned(-1)
ROWS = partitioned(-2)


def one_node(op: str, width: int, with_dim: bool) -> Graph:
    builder = Builder("g")
    x = builder.input("x", tensor("f64", TOKENS, width))
    attributes = {"dim": -1, "degree": DEGREE} if with_dim else {}
    return builder.build([builder.add(op, [x], name="y", **attributes)])


@pytest.mark.parametrize(
    ("op", "before", "after"),
    [
        ("replicate", WHOLE, REPLICATED),
        ("all_reduce", PRE_REDUCE, WHOLE),
        ("own_part", WHOLE, PART),
        ("all_gather", PART, WHOLE),
        ("taken_part", REPLICATED, PART),
        ("placed_part", PART, PRE_REDUCE),
    ],
)
def test_a_transition_changes_how_a_tensor_is_held_and_no_number(
    op: str, before: Layout, after: Layout
) -> None:
    x, dy = torch.randn(2, 5, 6, dtype=torch.float64).unbind()
    graph = one_node(op, 3 if before == PART else 6, with_dim=PART in (before, after))
    found = Differentiate(wrt=("x",)).run(graph)
    assert found.needed == ()
    parts = held(x, before, DEGREE, "x")
    upstream = held(dy, dual(after), DEGREE, "dy")

    def on_rank(ranks: ThreadRanks) -> tuple[Tensor, Tensor]:
        batch = Spread(ranks)
        (y,) = evaluate(graph, {"x": parts[ranks.rank]}, batch)
        (dx,) = evaluate(found.backward, {"d_y": upstream[ranks.rank]}, batch)
        return y, dx

    ys, dxs = zip(*run_ranks(DEGREE, on_rank), strict=True)
    for expected, whole in ((x, joined(ys, after)), (dy, joined(dxs, dual(before)))):
        assert whole is not None
        torch.testing.assert_close(whole, expected)


@pytest.mark.parametrize("tokens", [1, 5, 6])
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize(
    ("op", "before", "after"),
    [
        ("reduce_scatter", PRE_REDUCE, ROWS),
        ("gathered_copy", ROWS, REPLICATED),
        ("own_part", WHOLE, ROWS),
        ("all_gather", ROWS, WHOLE),
        ("taken_part", REPLICATED, ROWS),
        ("placed_part", ROWS, PRE_REDUCE),
    ],
)
def test_a_transition_of_tokens(
    op: str, before: Layout, after: Layout, degree: int, tokens: int
) -> None:
    """The same where the ranks hold parts of the tokens, of any number; rows of none are zeros."""
    x, dy = torch.randn(2, tokens, 6, dtype=torch.float64).unbind()
    builder = Builder("g")
    rows = part_of_tokens(degree) if before == ROWS else TOKENS
    flag: dict[str, Attribute] = {} if op == "reduce_scatter" else {"tokens": True}
    value = builder.input("x", tensor("f64", rows, 6))
    y = builder.add(op, [value], name="y", dim=-2, degree=degree, **flag)
    graph = builder.build([y])
    verify(graph)
    found = Differentiate(wrt=("x",)).run(graph)
    parts = rows_held(x, before, degree, "x")
    upstream = rows_held(dy, dual(after), degree, "dy")

    def on_rank(ranks: ThreadRanks) -> tuple[Tensor, Tensor]:
        batch = Spread(ranks)
        batch.tokens = tokens
        (y,) = evaluate(graph, {"x": parts[ranks.rank]}, batch)
        (dx,) = evaluate(found.backward, {"d_y": upstream[ranks.rank]}, batch)
        return y, dx

    ys, dxs = zip(*run_ranks(degree, on_rank), strict=True)
    for expected, ranks_have, layout in ((x, ys, after), (dy, dxs, dual(before))):
        whole = joined(ranks_have, layout)
        assert whole is not None
        torch.testing.assert_close(whole[:tokens], expected)
        assert not whole[tokens:].any()


def rows_held(x: Tensor, layout: Layout, degree: int, key: object) -> list[Tensor]:
    """What each rank holds; parts of the tokens have equally many rows."""
    padding = -len(x) % degree if layout == ROWS else 0
    return held(F.pad(x, (0, 0, 0, padding)), layout, degree, key)


@pytest.mark.parametrize("tokens", [1, 5, 8])
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("shape", [(3,), (2, 3)], ids=["tokens", "choices"])
def test_rows_go_to_the_ranks_of_their_experts_and_back(
    shape: tuple[int, ...], degree: int, tokens: int
) -> None:
    """Gradients of dispatched rows are collected, and those of collected rows dispatched."""
    each = 8 // degree
    indices = torch.rand(tokens, 8, generator=seeded("experts")).argsort(1)[:, :2]
    ranks_of_rows = [indices // each == rank for rank in range(degree)]
    if len(shape) == 1:
        ranks_of_rows = [chosen.any(1) for chosen in ranks_of_rows]
    own = [chosen.view(*chosen.shape, 1) for chosen in ranks_of_rows]
    rows = part_of_tokens(degree)
    graphs = {}
    for op, size in (("dispatched", rows), ("collected", TOKENS)):
        builder = Builder("g")
        names = [builder.input("x", tensor("f64", size, *shape))]
        names.append(builder.input("indices", tensor("i64", TOKENS, 2)))
        graphs[op] = builder.build([builder.add(op, names, name="y", degree=degree, experts=each)])
        verify(graphs[op])
    backward = {op: Differentiate(wrt=("x",)).run(graph) for op, graph in graphs.items()}
    assert all(found.needed == ("indices",) for found in backward.values())
    x = torch.randn(tokens, *shape, dtype=torch.float64)
    padding = (0, 0) * len(shape) + (0, -tokens % degree)
    parts = F.pad(x, padding).chunk(degree)
    of_ranks = torch.randn(degree, tokens, *shape, dtype=torch.float64)

    def on_rank(ranks: ThreadRanks) -> list[Tensor]:
        rank, batch = ranks.rank, Spread(ranks)

        def run(graph: Graph, name: str, value: Tensor) -> Tensor:
            return evaluate(graph, {name: value, "indices": indices.clone()}, batch)[0]

        return [
            run(graphs["dispatched"], "x", parts[rank]),
            run(backward["collected"].backward, "d_y", parts[rank]),
            run(graphs["collected"], "x", of_ranks[rank]),
            run(backward["dispatched"].backward, "d_y", of_ranks[rank]),
        ]

    summands = [torch.where(mask, y, 0) for mask, y in zip(own, of_ranks, strict=True)]
    sums = F.pad(torch.stack(summands).sum(0), padding).chunk(degree)
    for rank, found in enumerate(run_ranks(degree, on_rank)):
        for dispatched in found[:2]:
            torch.testing.assert_close(dispatched, torch.where(own[rank], x, 0))
        for collected in found[2:]:
            torch.testing.assert_close(collected, sums[rank])


def test_rows_of_a_parted_table() -> None:
    table, ids = torch.randn(8, 3), torch.tensor([0, 7, 3, 4, 4])
    builder = Builder("g")
    names = [builder.input("table", tensor("f32", 8 // DEGREE, 3))]
    names.append(builder.input("ids", tensor("i64", TOKENS)))
    graph = builder.build([builder.add("embedding_part", names)])

    def on_rank(ranks: ThreadRanks) -> Tensor:
        values = {"table": table.chunk(DEGREE)[ranks.rank], "ids": ids}
        return evaluate(graph, values, Spread(ranks))[0]

    torch.testing.assert_close(sum(run_ranks(DEGREE, on_rank)), F.embedding(ids, table))


@pytest.mark.parametrize(("degree", "smoothing"), [(2, 0.0), (4, 0.0), (2, 0.1)])
def test_the_loss_of_parted_logits(degree: int, smoothing: float) -> None:
    logits = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 7, -100, 3, 4, -1])
    dloss = torch.rand(6, dtype=torch.float64)
    expected = F.cross_entropy(
        logits, targets.masked_fill(targets < 0, -100), ignore_index=-100, reduction="none",
        label_smoothing=smoothing,
    )  # fmt: skip
    (wanted,) = torch.autograd.grad(expected, logits, dloss)
    builder = Builder("g")
    names = [builder.input("logits", tensor("f64", TOKENS, 8 // degree))]
    names.append(builder.input("targets", tensor("i64", TOKENS)))
    attributes: Any = {"smoothing": smoothing} if smoothing else {}
    loss_name = builder.add("cross_entropy_part", names, name="loss", **attributes)
    graph = builder.build([loss_name])
    found = Differentiate(wrt=("logits",)).run(graph)

    def on_rank(ranks: ThreadRanks) -> tuple[Tensor, Tensor]:
        own = logits.detach().chunk(degree, -1)[ranks.rank]
        values = {"logits": own, "targets": targets}
        (loss,) = evaluate(graph, values, Spread(ranks))
        (dlogits,) = evaluate(found.backward, values | {"d_loss": dloss}, Spread(ranks))
        return loss, dlogits

    losses, gradients = zip(*run_ranks(degree, on_rank), strict=True)
    for loss in losses:
        torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(torch.cat(gradients, -1), wanted)


def test_an_error_on_one_rank_ends_the_others() -> None:
    def on_rank(ranks: ThreadRanks) -> None:
        if ranks.rank:
            raise ValueError("out of numbers")
        ranks.all_reduce(torch.ones(1))

    run: Callable[[], object] = lambda: run_ranks(DEGREE, on_rank)  # noqa: E731
    with pytest.raises(ValueError, match="out of numbers"):
        run()


@pytest.mark.parametrize("op", ["all_gathers", "all_reduces"])
def test_one_message_of_several_tensors_is_as_several_messages(op: str) -> None:
    """Forward and backward, with what no adapter has at a site."""
    widths, one = (3, 4, 2), op.removesuffix("s")
    builder = Builder("g")
    names = [builder.input(f"x{i}", tensor("f64", 4, n)) for i, n in enumerate(widths)]
    attributes = {"dims": (-1, -2, -1), "degree": DEGREE} if op == "all_gathers" else {}
    together = builder.build(builder.add_many(op, names, name="y", **attributes))
    apart = Builder("apart")
    for i, n in enumerate(widths):
        apart.input(f"x{i}", tensor("f64", 4, n))
    dims = [{"dim": dim, "degree": DEGREE} if attributes else {} for dim in (-1, -2, -1)]
    several = apart.build(
        [apart.add(one, [name], **each) for name, each in zip(names, dims, strict=True)]
    )
    values = [
        {
            name: torch.randn(4, n, dtype=torch.float64)
            for name, n in zip(names, widths, strict=True)
        }
        for _ in range(DEGREE)
    ]

    def on_rank(ranks: ThreadRanks) -> list[Tensor]:
        batch = Spread(ranks)
        found = []
        for graph in (together, several):
            ys = evaluate(graph, values[ranks.rank], batch)
            back = Differentiate(wrt=tuple(names)).run(graph)
            upstream = {f"d_{n}": y.cos() for n, y in zip(graph.outputs, ys, strict=True)}
            found.append([*ys, *evaluate(back.backward, upstream, batch)])
        assert ranks.messages[one] == 1 + len(widths)
        assert ranks.moved_bytes[one] % 2 == 0
        for x, y in zip(*found, strict=True):
            torch.testing.assert_close(x, y)
        return list(found[0])

    run_ranks(DEGREE, on_rank)


def test_what_no_adapter_has_is_not_sent() -> None:
    def on_rank(ranks: ThreadRanks) -> None:
        batch = Spread(ranks)
        x = torch.full((2, 3), float(ranks.rank + 1))
        assert torch_ops.all_reduces([None, None], batch) == [None, None]
        assert torch_ops.all_gathers([None, None], (-1, -1), batch) == [None, None]
        assert not any(ranks.messages.values())
        nothing, total = torch_ops.all_reduces([None, x], batch)
        assert nothing is None
        assert torch.equal(total, torch.full((2, 3), 3.0))
        whole, nothing = torch_ops.all_gathers([x, None], (-2, -1), batch)
        assert nothing is None
        assert whole.shape == (4, 3)

    run_ranks(DEGREE, on_rank)
