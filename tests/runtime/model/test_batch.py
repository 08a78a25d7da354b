"""A batch's tensors are those of its spans, wherever the sequences' pages lie."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pcg.ir.types import TOKENS, Dim, TensorType
from pcg.kernels.batch import Span
from pcg.kernels.sizes import PAGE_TOKENS
from pcg.kernels.torch import input_gradient
from pcg.kernels.torch.input_gradient import product_backward
from pcg.kernels.torch.products import ProductRequest, product
from pcg.runtime.memory.kv_cache import KvCache
from pcg.runtime.memory.pool import PagePool, PageTable
from pcg.runtime.model.batch import Batch, Singles, decode_groups
from pcg.runtime.model.merged_execution import BLOCK, CutExecution, run_merged

CPU = torch.device("cpu")
ROW = TensorType("f64", (Dim(TOKENS), Dim(1), Dim(1)))


@given(st.data())
def test_positions_rows_and_last_tokens(random: st.DataObject) -> None:
    cache = KvCache([(ROW, ROW)], random.draw(st.integers(1, 30)), CPU)
    pool, tables = cache.pool, list[PageTable]()
    for expected, need, closes in random.draw(
        st.lists(st.tuples(st.sampled_from([0, 4]), st.integers(1, 4), st.booleans()), max_size=12)
    ):
        if need <= pool.free:
            tables.append(pool.open("someone", expected))
            pool.extend(tables[-1], need)
        if closes and len(tables) > 1:
            pool.close(tables.pop(len(tables) // 2))
    spans, total = [], 0
    for table in tables:
        end = random.draw(st.integers(1, table.capacity))
        length = random.draw(st.just(1) | st.integers(1, end))
        virtual = random.draw(st.integers(0, length))
        spans.append(Span(total, length, end - length, table, virtual))
        total += length
    batch = Batch(torch.zeros(total, dtype=torch.long), spans, cache)
    tokens = [(span, span.context + i) for span in spans for i in range(span.length)]
    assert batch.positions.tolist() == [position for _, position in tokens]
    last = batch.last_tokens(range(len(spans)))
    assert last.tolist() == [span.start + span.length - 1 for span in spans]
    for place in range(len(spans)):
        assert torch.equal(batch.last_tokens([place]), last[place : place + 1])
    assert batch.positions.dtype is last.dtype is torch.int64
    virtual_tokens = [(s.start + i, s.context + i) for s in spans for i in range(s.virtual)]
    if virtual_tokens:
        assert batch.virtual_rows is not None
        assert batch.virtual_places is not None
        found = zip(batch.virtual_rows.tolist(), batch.virtual_places.tolist(), strict=True)
        assert list(found) == virtual_tokens
    else:
        assert batch.virtual_rows is None
    assert batch.longer_spans == [span for span in spans if span.length > 1]
    alike = {span.length for span in spans}
    whole = len(alike) == 1 and all(not span.context for span in spans)
    assert batch.uniform_length == (alike.pop() if whole else 0)
    new = torch.arange(1.0, total + 1, dtype=torch.float64).view(-1, 1, 1)
    written = batch.append(new, -new)
    assert written is not None
    expected = torch.zeros(pool.size * PAGE_TOKENS, dtype=torch.float64)
    for i, (span, position) in enumerate(tokens):
        page = span.table.pages[position // PAGE_TOKENS]
        expected[page * PAGE_TOKENS + position % PAGE_TOKENS] = i + 1
    assert torch.equal(written[0].flatten(), expected)
    assert torch.equal(written[1].flatten(), -expected)


# ----------------------------------------------------------------------------- groups of sequences


def random_tables(random: st.DataObject) -> tuple[PagePool, list[PageTable]]:
    """Tables with pages, some in runs and some scattered, at equal distances and not."""
    pool, tables = PagePool(random.draw(st.integers(12, 90))), list[PageTable]()
    for expected, need, closes in random.draw(
        st.lists(st.tuples(st.sampled_from([0, 4, 6]), st.integers(1, 6), st.booleans()))
    ):
        if need <= pool.free:
            tables.append(pool.open("someone", expected))
            pool.extend(tables[-1], need)
        if closes and len(tables) > 1:
            pool.close(tables.pop(len(tables) // 2))
    return pool, tables


@given(st.data(), st.sampled_from([0, 9, 40]))
def test_each_sequence_sees_its_own_rows(random: st.DataObject, window: int) -> None:
    pool, tables = random_tables(random)
    lengths = [random.draw(st.integers(1, table.capacity)) for table in tables]
    rows = pool.size * PAGE_TOKENS
    places = [table.run_row for table in tables], [table.stop_row for table in tables]
    columns = (np.array(x, dtype=np.int64) for x in (range(len(tables)), *places, lengths))
    groups = decode_groups(Singles(*columns, tables), window, torch.float64, CPU)
    of_others = {
        id(table): {page for other in tables if other is not table for page in other.pages}
        for table in tables
    }
    assert sorted(i for group in groups for i in group.tokens.tolist()) == list(range(len(tables)))
    for group in groups:
        seen = [min(lengths[i], window or lengths[i]) for i in group.tokens.tolist()]
        assert group.longest == max(seen)
        assert group.longest * len(seen) <= 2 * sum(seen)
        assert (group.mask is None) == (len(set(seen)) == 1)
        for place, (i, count) in enumerate(zip(group.tokens.tolist(), seen, strict=True)):
            if group.rows is None:
                first = group.row + place * group.stride
                found = list(range(first, first + group.longest))
                assert found[-1] < rows
            else:
                found = group.rows[place].tolist()
            # What the mask hides is read, too: it is nobody else's.
            assert not {row // PAGE_TOKENS for row in found} & of_others[id(tables[i])]
            assert found[:count] == list(tables[i].rows(lengths[i] - count, lengths[i]))
            if group.mask is not None:
                mask = group.mask[place, 0, 0]
                assert mask.dtype is torch.float64
                assert (mask[:count] == 0).all()
                assert (mask[count:] == float("-inf")).all()


# -------------------------------------------------------------------------- functions side by side

SIZES = {"q": 24, "k": 8, "v": 16}
COLUMNS = 12
TOKENS = 5


class Layer:
    layer = 2


def gradients_of(groups: Sequence[str], dys: dict[str, torch.Tensor], weights: Any) -> Any:
    """A function that asks for the gradients of some groups of weights, one after the other."""

    def ask() -> ProductRequest[Any]:
        batch: Any = Layer()
        whole = torch.zeros(len(dys["q"]), COLUMNS, dtype=torch.float64)
        for first, *rest in groups:
            others = [(name, dys[name], weights[name]) for name in rest]
            whole += yield from product_backward(
                batch, first, dys[first], weights[first], None, others
            )
        return whole

    return ask()


JOINED = ("qkv",)
APART = ("v", "k", "q")


@pytest.mark.parametrize(
    ("jobs", "calls"),
    [
        ([JOINED], [("qkv", 1)]),
        ([JOINED, JOINED], [("qkv", 2)]),
        ([JOINED, APART], [("v", 2), ("k", 2), ("q", 2)]),
        ([JOINED, APART, ("qvk",), JOINED], [("v", 4), ("k", 4), ("q", 4)]),
        # Whoever shares a weight, its product is one; the others go on.
        ([JOINED, ("qv",)], [("v", 2), ("q", 2), ("k", 1)]),
        ([JOINED, ("k",)], [("k", 2), ("v", 1), ("q", 1)]),
        ([("qk",), ("v",)], [("qk", 1), ("v", 1)]),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_cut", [False, True], ids=["whole", "cut"])
def test_each_weight_is_multiplied_once(
    jobs: Any, calls: list[tuple[str, int]], is_cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    numbers = {"dtype": torch.float64, "generator": generator}
    weights = {name: torch.randn(size, COLUMNS, **numbers) for name, size in SIZES.items()}
    # Each job has as many tokens more.
    counts = [TOKENS + number for number in range(len(jobs))]
    dys = [{name: torch.randn(n, size, **numbers) for name, size in SIZES.items()} for n in counts]
    expected = [
        sum(own[name] @ weights[name] for group in job for name in group)
        for job, own in zip(jobs, dys, strict=True)
    ]
    ran: list[tuple[int, int]] = []
    product = input_gradient.linear_backward

    def counted(dy: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ran.append((weight.shape[0], len(dy)))
        return product(dy, weight)

    monkeypatch.setattr(input_gradient, "linear_backward", counted)
    functions = [gradients_of(job, own, weights) for job, own in zip(jobs, dys, strict=True)]
    if is_cut:
        cut: CutExecution[torch.Tensor] = CutExecution(functions)
        while not cut.is_done:
            cut.run(10)
        found = cut.results
    else:
        found = run_merged(functions)
        # Weights behind the first of a sum are added to it where it lies, and not counted.
        every = sum(counts)
        assert [size for size, _ in ran] == [SIZES[names[0]] for names, _ in calls]
        for (_, tokens), (_, sharing) in zip(ran, calls, strict=True):
            assert (tokens == every) is (sharing == len(jobs))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


# ------------------------------------------------------------------------------- functions in parts

VOCABULARY, HIDDEN = 2500, 5
"""Three blocks of rows, the last one shorter."""
BATCH: Any = SimpleNamespace(layer=2, is_alone=False)


def loss_and_gradient(
    x: Tensor, head: Tensor, bias: Tensor, targets: Tensor
) -> ProductRequest[tuple[Tensor, Tensor]]:
    (logits,) = yield from product(BATCH, "head", x, [head], [bias])
    loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    slope = torch.softmax(logits, -1)
    slope[torch.arange(len(x)), targets] -= 1
    return loss, (yield from product_backward(BATCH, "head", slope, head))


@given(
    counts=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 200_000), min_size=1, max_size=5),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
@settings(max_examples=25, deadline=None)
def test_losses_in_parts_are_those_of_autograd(
    counts: list[int], sizes: list[int], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    head, bias = torch.randn(VOCABULARY, HIDDEN).to(dtype), torch.randn(VOCABULARY).to(dtype)
    xs = [torch.randn(count, HIDDEN).to(dtype) for count in counts]
    targets = [torch.randint(VOCABULARY, (count,)) for count in counts]
    cut = CutExecution(
        [loss_and_gradient(x, head, bias, t) for x, t in zip(xs, targets, strict=True)]
    )
    ran, turn, whole = 0, 0, 2 * sum(counts) * VOCABULARY
    while not cut.is_done:
        size = sizes[turn % len(sizes)]
        part = cut.run(size)
        assert part <= size + BLOCK * sum(counts)
        ran, turn = ran + part, turn + 1
    assert ran == whole
    rel = 0.05 if dtype == torch.bfloat16 else 1e-4
    for x, target, (loss, gradient) in zip(xs, targets, cut.results, strict=True):
        wide = x.float().requires_grad_()
        logits = torch.nn.functional.linear(wide, head.float(), bias.float())
        expected = torch.nn.functional.cross_entropy(logits, target, reduction="sum")
        expected.backward()
        assert float(loss) == pytest.approx(expected.item(), rel=rel)
        assert wide.grad is not None
        assert gradient.dtype == dtype
        error = (gradient.float() - wide.grad).norm() / wide.grad.norm()
        assert error < rel
