"""Ragged attention against an explicit softmax in fp64, and its backward against autograd."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pcg.ir.types import TOKENS, tensor
from pcg.kernels.batch import KvGradients, Span
from pcg.kernels.torch import attention_math
from pcg.kernels.torch.attention import attention, attention_backward
from pcg.runtime.memory.kv_cache import KvCache
from pcg.runtime.memory.pool import pages_for
from pcg.runtime.model.batch import Batch, whole_sequences
from tests.support.attention_cases import Case, reference
from tests.support.flash_stand_in import attention_of_a_gpu

CPU = torch.device("cpu")


def small(**changes: Any) -> Case:
    """A case in fp64, of heads of 8."""
    return Case(**{"size": 8, "value_size": 8, "dtype": torch.float64, **changes})


def keywords_of(case: Case) -> dict[str, Any]:
    """Its scoring, whose slopes and sinks are in fp64, too."""
    pairs = case.keywords().items()
    return {name: x.double() if isinstance(x, Tensor) else x for name, x in pairs}


def reference_of_all(
    lengths: Sequence[int], q: Tensor, k: Tensor, v: Tensor, **options: object
) -> tuple[Tensor, Tensor]:
    parts = zip(*(x.split(list(lengths)) for x in (q, k, v)), strict=True)
    outs, sums = zip(*(reference(*part, 0, **options) for part in parts), strict=True)
    return torch.cat(outs), torch.cat(sums)


@st.composite
def options(draw: st.DrawFn) -> Case:
    size = draw(st.sampled_from([2, 4, 8]))
    reach = draw(st.sampled_from([0, 0, 1, 2, 3, 5, -2, -4]))
    return small(
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 3)),
        size=size,
        value_size=draw(st.sampled_from([size, size, 6])),
        window=max(reach, 0),
        chunk=max(-reach, 0),
        softcap=draw(st.sampled_from([0.0, 0.0, 1.5])),
        alibi=draw(st.booleans()),
        sinks=draw(st.booleans()),
    )


RAGGED = st.lists(st.integers(1, 9), min_size=1, max_size=4)
UNIFORM = st.tuples(st.integers(1, 9), st.integers(1, 4)).map(lambda pair: [pair[0]] * pair[1])
NAMED = {
    "mha": small(kv_heads=4, group=1),
    "gqa": small(),
    "mqa": small(kv_heads=1, group=4),
    "window": small(window=3),
    "chunk": small(chunk=4),
    "softcap": small(softcap=2.0),
    "alibi": small(alibi=True),
    "sinks": small(sinks=True),
    "alibi-window": small(alibi=True, window=3),
    "alibi-chunk": small(alibi=True, chunk=3),
    "softcap-window": small(softcap=2.0, window=4),
    "everything": small(window=3, softcap=2.0, alibi=True, sinks=True, value_size=6),
}


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def check_whole(chosen: Case, lengths: Sequence[int]) -> None:
    """Forward and backward of whole sequences."""
    q, k, v = (x.requires_grad_() for x in chosen.tensors(sum(lengths)))
    keywords = keywords_of(chosen)
    batch = whole_sequences([[0] * length for length in lengths], CPU, keeps=True)
    with torch.no_grad():
        out, lse = attention(batch, q, k, v, **keywords)
    expected, sums = reference_of_all(lengths, q, k, v, **keywords)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(lse, sums, rtol=1e-10, atol=1e-12)
    dout = torch.randn(out.shape, generator=seeded(1), dtype=out.dtype)
    gradients = torch.autograd.grad(expected, (q, k, v), dout)
    with torch.no_grad():
        found = attention_backward(batch, dout, out, lse, q, k, v, **keywords)
    for gradient, wanted in zip(found, gradients, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-11)


@pytest.fixture(params=["host", "host-blocks", "blocks", "flash"])
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    """The way that attention takes: a CPU's, or a GPU's without and with flash kernels.

    Blocks are of one row to some, by the number of keys.
    """
    if request.param.startswith("host"):
        size = 2**20 if request.param == "host" else 400
        with patch.object(attention_math, "BLOCK_BYTES", size):
            yield
        return
    with attention_of_a_gpu(has_flash=request.param == "flash", block_bytes=4000) as calls:
        yield
    assert bool(calls) == (
        request.param == "flash" and request.node.callspec.params["name"] in FLASH
    )


FLASH = ("mha", "gqa", "mqa", "window", "sinks")
"""Those of `NAMED` that flash kernels know."""


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("lengths", [(9, 2, 5, 1), (6, 6, 6)], ids=["ragged", "uniform"])
def test_whole_sequences(name: str, lengths: Sequence[int]) -> None:
    check_whole(NAMED[name], lengths)


@given(options(), st.one_of(RAGGED, UNIFORM))
def test_whole_sequences_of_any_options(chosen: Case, lengths: list[int]) -> None:
    check_whole(chosen, lengths)


def check_cached(
    chosen: Case, chunks: Sequence[Sequence[int]], spare: Sequence[int], dtype: str = "f64"
) -> None:
    """Sequences come in chunks, each a span of one step; what they see is in the cache.

    Args:
        chosen: what attention does.
        chunks: for each sequence the lengths of its chunks; step i takes everyone's i-th.
        spare: pages that each sequence is expected to grow into; its pages lie apart where it
            outgrows them.
        dtype: of all tensors.
    """
    torch_dtype = {"f64": torch.float64, "f32": torch.float32}[dtype]
    lengths = [sum(parts) for parts in chunks]
    q, k, v = (x.to(torch_dtype) for x in chosen.tensors(sum(lengths)))
    keywords = keywords_of(chosen)
    expected, _ = reference_of_all(lengths, *(x.double() for x in (q, k, v)), **keywords)
    types = (
        tensor(dtype, TOKENS, chosen.kv_heads, chosen.size),
        tensor(dtype, TOKENS, chosen.kv_heads, chosen.value_size),
    )
    cache = KvCache([types], 100, CPU)
    tables = [cache.pool.open(f"sequence {i}", max(n, 0)) for i, n in enumerate(spare)]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    done = [0] * len(lengths)
    for step in range(max(map(len, chunks))):
        spans, rows, total = [], [], 0
        for i, parts in enumerate(chunks):
            if step < len(parts):
                table = tables[i]
                cache.pool.extend(table, pages_for(done[i] + parts[step]) - len(table.pages))
                spans.append(Span(total, parts[step], done[i], table))
                rows += range(starts[i] + done[i], starts[i] + done[i] + parts[step])
                total += parts[step]
                done[i] += parts[step]
        batch = Batch(torch.zeros(total, dtype=torch.long), spans, cache)
        out, lse = attention(batch, q[rows], k[rows], v[rows], **keywords)
        assert lse is None
        tolerance = 1e-10 if dtype == "f64" else 1e-5
        torch.testing.assert_close(out.double(), expected[rows], rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", NAMED)
def test_chunked_prefill_then_decode(name: str) -> None:
    chunks = [[14, 3, 1, 1, 1], [20, 5, 1, 1], [7, 1, 1, 1], [1, 1, 1, 1, 1, 1]]
    check_cached(NAMED[name], chunks, spare=(0, 3, 1, 0))


@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("dtype", ["f64", "f32"])
def test_decode_of_sequences_at_equal_distances(window: int, dtype: str) -> None:
    """Equal expectations put sequences at equal distances in the cache: they decode in one call."""
    chunks = [[prompt, *[1] * 6] for prompt in (15, 14, 16, 13, 12)]
    check_cached(small(window=window), chunks, [2] * 5, dtype)


@pytest.mark.parametrize("window", [0, 4])
def test_decode_of_pages_that_lie_apart(window: int) -> None:
    chunks = [[prompt, *[1] * 20] for prompt in (15, 14, 16, 3, 12)]
    check_cached(small(window=window), chunks, [0, 0, 4, 4, 0])


@st.composite
def arrivals(draw: st.DrawFn) -> tuple[list[list[int]], list[int]]:
    count = draw(st.integers(1, 5))
    parts = st.lists(st.sampled_from([1, 1, 1, 2, 4, 15, 18]), min_size=1, max_size=6)
    chunks = [draw(parts) for _ in range(count)]
    if draw(st.booleans()):
        return chunks, [pages_for(max(map(sum, chunks)))] * count
    return chunks, [draw(st.integers(0, 4)) for _ in chunks]


@given(options(), arrivals())
def test_any_chunks_of_any_options(
    chosen: Case, arriving: tuple[list[list[int]], list[int]]
) -> None:
    check_cached(chosen, *arriving)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.integers(0, 5), st.booleans())
def test_plain_decode(contexts: list[int], window: int, equal: bool) -> None:
    """Each sequence has a prompt and decodes: the path of every serving step."""
    spare = [2 if equal else n % 3 for n in contexts]
    check_cached(small(window=window), [[n, 1, 1] for n in contexts], spare)


def check_windows(
    chosen: Case, chunks: Sequence[Sequence[int]], spare: Sequence[int], ends: Sequence[int]
) -> None:
    """Sequences are trained on window by window: forward from the first, backward from the last.

    Args:
        chosen: what attention does.
        chunks: lengths of the sequences' parts; windows end with some of them.
        spare: pages that each sequence is expected to grow into.
        ends: numbers of parts, of all sequences one behind the other, that end a window.
    """
    lengths = [sum(parts) for parts in chunks]
    q, k, v = (x.requires_grad_() for x in chosen.tensors(sum(lengths)))
    keywords = keywords_of(chosen)
    expected, sums = reference_of_all(lengths, q, k, v, **keywords)
    dout = torch.randn(q.shape[0], q.shape[1], v.shape[2], generator=seeded(1), dtype=q.dtype)
    gradients = torch.autograd.grad(expected, (q, k, v), dout)
    types = tuple(tensor("f64", TOKENS, *x.shape[1:]) for x in (k, v))
    cache = KvCache([types], 100, CPU)
    windows: list[list[Span]] = [[]]
    number = done = 0
    for i, parts in enumerate(chunks):
        table = cache.pool.open(f"sequence {i}", spare[i])
        origin = done
        for part in parts:
            start = sum(span.length for span in windows[-1])
            if windows[-1] and windows[-1][-1].table is table:
                before = windows[-1].pop()
                start, part, done = before.start, part + before.length, done - before.length
            cache.pool.extend(table, pages_for(done - origin + part) - len(table.pages))
            windows[-1].append(Span(start, part, done - origin, table, origin=origin))
            done += part
            if number in ends:
                windows.append([])
            number += 1
    batches = []
    with torch.no_grad():
        for spans in filter(None, windows):
            rows = slice(spans[0].origin + spans[0].context, None)
            rows = slice(rows.start, rows.start + sum(span.length for span in spans))
            batch = Batch(torch.zeros(rows.stop - rows.start).long(), spans, cache, keeps=True)
            out, lse = attention(batch, q[rows], k[rows], v[rows], **keywords)
            assert lse is not None
            torch.testing.assert_close(out, expected[rows], rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(lse, sums[rows], rtol=1e-10, atol=1e-12)
            batches.append((batch, rows, out, lse))
        total = KvGradients(*batches[0][0].cached, done)
        for batch, rows, out, lse in reversed(batches):
            batch.gradients = total
            own = attention_backward(
                batch, dout[rows], out, lse, q[rows], k[rows], v[rows], **keywords
            )
            for found, wanted in zip(own, gradients, strict=True):
                torch.testing.assert_close(found, wanted[rows], rtol=1e-9, atol=1e-11)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", NAMED)
def test_windows(name: str) -> None:
    check_windows(NAMED[name], [[4, 17, 1], [1, 1], [30]], [0, 0, 3], [0, 1, 3])


@given(options(), arrivals(), st.sets(st.integers(0, 30)))
def test_any_windows_of_any_options(
    chosen: Case, arriving: tuple[list[list[int]], list[int]], ends: set[int]
) -> None:
    check_windows(chosen, *arriving, sorted(ends))


def test_bf16_rounds_once() -> None:
    """The inside is fp32: the result is the exact one to a rounding of inputs' size."""
    for name in ("gqa", "softcap", "sinks", "window"):
        chosen = NAMED[name]
        q, k, v = (x.bfloat16() for x in chosen.tensors(15))
        batch = whole_sequences([[0] * 9, [0] * 6], CPU, keeps=True)
        out, lse = attention(batch, q, k, v, **keywords_of(chosen))
        exact, sums = reference_of_all(
            (9, 6), *(x.double() for x in (q, k, v)), **keywords_of(chosen)
        )
        assert out.dtype == torch.bfloat16
        assert lse is not None
        assert lse.dtype == torch.float32
        torch.testing.assert_close(out.double(), exact, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(lse.double(), sums, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "on_host"),
    [("mha", False), ("everything", False), ("alibi-window", True), ("everything", True)],
)
def test_scores_of_a_long_sequence_never_exist(name: str, on_host: bool) -> None:
    """Without flash kernels no tensor is as large as the scores of one head."""
    chosen, length, block_bytes = NAMED[name], 256, 2**18
    q, k, v = (x.float() for x in chosen.tensors(length))
    batch = whole_sequences([[0] * length], CPU, keeps=True)
    on_gpu = attention_of_a_gpu(has_flash=False, block_bytes=block_bytes)
    in_blocks = patch.object(attention_math, "BLOCK_BYTES", block_bytes)
    with in_blocks if on_host else on_gpu, LargestTensor() as largest:
        out, lse = attention(batch, q, k, v, **keywords_of(chosen))
        attention_backward(batch, out, out, lse, q, k, v, **keywords_of(chosen))
    assert largest.bytes <= max(block_bytes // (2 if on_host else 4), q.nbytes)
    assert largest.bytes < 4 * length * length


class LargestTensor(TorchDispatchMode):
    """The bytes of the largest tensor that an operator makes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, operator: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = operator(*args, **(kwargs or {}))
        sizes = [x.nbytes for x in tree_leaves(found) if isinstance(x, Tensor)]
        self.bytes = max(self.bytes, *sizes, 0)
        return found
