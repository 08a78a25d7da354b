"""Batches of attention in pages that lie anywhere, and an explicit softmax in fp64."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

from pcg.kernels.batch import Span
from pcg.kernels.sizes import PAGE_TOKENS
from pcg.kernels.torch.attention_math import Scoring
from pcg.kernels.triton.attention.cache_rows import CacheRows, KvRows
from pcg.runtime.memory.pool import PageTable

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Of results against exact ones of the same rounded inputs: theirs, and that of the weights."""


@dataclasses.dataclass(frozen=True)
class Case:
    """What a model asks of its attention, and where its cache lies."""

    kv_heads: int = 2
    group: int = 2
    size: int = 64
    value_size: int = 64
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    dtype: torch.dtype = torch.float32
    arena: bool = False
    """Whether keys and values are parts of pages of one tensor, [pages, 16, K, D + Dv]."""
    device: str = "cpu"

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    def keywords(self) -> dict[str, object]:
        slopes = 2.0 ** -torch.arange(1, self.heads + 1, device=self.device)
        return {
            "scale": 0.9 * self.size**-0.5,
            "window": self.window,
            "chunk": self.chunk,
            "softcap": self.softcap,
            "alibi": slopes if self.alibi else None,
            "sinks": torch.linspace(-1, 2, self.heads, device=self.device) if self.sinks else None,
        }

    @property
    def scoring(self) -> Scoring:
        return Scoring(**self.keywords())

    def tensors(self, tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v as views of one product, [tokens, heads, size]."""
        shapes = (
            (self.heads, self.size),
            (self.kv_heads, self.size),
            (self.kv_heads, self.value_size),
        )
        widths = [heads * size for heads, size in shapes]
        generator = torch.Generator().manual_seed(seed)
        fused = torch.randn(tokens, sum(widths), generator=generator)
        fused = fused.to(self.device, self.dtype)
        q, k, v = (
            x.unflatten(1, shape) for x, shape in zip(fused.split(widths, 1), shapes, strict=True)
        )
        return q, k, v

    def cache(self, pages: int) -> KvRows:
        """Of NaNs: what no sequence wrote is not to be used."""
        nan, kind = float("nan"), {"dtype": self.dtype, "device": self.device}
        if not self.arena:
            k, v = (
                torch.full((self.kv_heads, pages * PAGE_TOKENS, size), nan, **kind)
                for size in (self.size, self.value_size)
            )
            return KvRows(CacheRows.of_layer(k), CacheRows.of_layer(v))
        both = self.size + self.value_size
        shape = (pages, PAGE_TOKENS, self.kv_heads, both)
        arena = torch.full(shape, nan, **kind)
        page, token, head, _ = arena.stride()
        return KvRows(
            CacheRows(arena, self.kv_heads, self.size, page, head, token),
            CacheRows(arena[..., self.size :], self.kv_heads, self.value_size, page, head, token),
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    size = draw(st.sampled_from([16, 32, 64, 80, 128]))
    group = draw(st.sampled_from([1, 2, 3, 4, 8]))
    reach = draw(st.sampled_from([0, 0, 1, 7, 33, 100, -9, -32]))
    return Case(
        kv_heads=draw(st.integers(1, 2)),
        group=group,
        size=size,
        value_size=draw(st.sampled_from([size, size, 64])),
        window=max(reach, 0),
        chunk=max(-reach, 0),
        softcap=draw(st.sampled_from([0.0, 0.0, 1.5])),
        alibi=draw(st.booleans()),
        sinks=draw(st.booleans()),
        dtype=draw(st.sampled_from(DTYPES)),
        arena=draw(st.booleans()),
    )


def reference(
    q: Tensor, k: Tensor, v: Tensor, context: int, **options: object
) -> tuple[Tensor, Tensor]:
    """One part: out [n, H, Dv] and lse [n, H] of q [n, H, D] against m keys and values, in fp64."""
    window, softcap = options["window"], options["softcap"]
    count, heads, _ = q.shape
    k, v = (x.double().repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    scores = options["scale"] * torch.einsum("nhd,mhd->hnm", q.double(), k)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    i = context + torch.arange(count, device=q.device)[:, None]
    j = torch.arange(len(k), device=q.device)
    if options["alibi"] is not None:
        scores = scores + options["alibi"].double()[:, None, None] * (j - i)
    hidden = j > i
    if window:
        hidden = hidden | (j <= i - window)
    if options["chunk"]:
        hidden = hidden | (j // options["chunk"] < i // options["chunk"])
    scores = scores.masked_fill(hidden, float("-inf"))
    if options["sinks"] is not None:
        sinks = options["sinks"].double()[:, None, None].expand(-1, count, 1)
        scores = torch.cat((scores, sinks), -1)
    weights = torch.softmax(scores, -1)[..., : len(k)]
    return torch.einsum("hnm,mhd->nhd", weights, v), torch.logsumexp(scores, -1).T


def span(
    start: int, length: int, context: int = 0, pages: Sequence[int] = (), origin: int = 0
) -> Span:
    """A span whose sequence has these pages; without any there is no cache."""
    table = PageTable("a test", list(pages)) if pages else None
    return Span(start, length, context, table, origin=origin)


class Paged:
    """A batch over a cache: random keys and values of each part's context lie in random pages.

    Attributes:
        parts: of the batch.
        q: of it; k, v: likewise, which the cache does not hold yet.
        kv: the cache.
        slots: where the batch's tokens go.
        wanted: keys and values of each part, context and new ones.
    """

    def __init__(self, case: Case, shape: Sequence[tuple[int, int]], seed: int = 0) -> None:
        """The parts' new tokens and contexts."""
        self.case = case
        needed = [-(-(length + context) // PAGE_TOKENS) for length, context in shape]
        generator = torch.Generator().manual_seed(seed)
        free = torch.randperm(sum(needed) + 3, generator=generator).tolist()
        self.kv = case.cache(len(free))
        self.parts: list[Span] = []
        self.wanted: list[tuple[Tensor, Tensor]] = []
        slots = []
        start = origin = 0
        for count, (length, context) in zip(needed, shape, strict=True):
            pages = [free.pop() for _ in range(count)]
            self.parts.append(span(start, length, context, pages, origin))
            start += length
            origin += length + context
        self.q, self.k, self.v = case.tensors(start, seed)
        for number, part in enumerate(self.parts):
            rows = rows_of(part)
            _, old_k, old_v = case.tensors(part.context, seed + 1 + number)
            for at, token in enumerate(rows[: part.context]):
                view(self.kv.keys, token).copy_(old_k[at])
                view(self.kv.values, token).copy_(old_v[at])
            slots += rows[part.context :]
            new = slice(part.start, part.start + part.length)
            self.wanted.append((torch.cat((old_k, self.k[new])), torch.cat((old_v, self.v[new]))))
        self.slots = torch.tensor(slots, device=case.device)

    def reference(self) -> tuple[Tensor, Tensor]:
        """out and lse of the whole batch."""
        found = [
            reference(
                self.q[part.start : part.start + part.length],
                *kv,
                part.context,
                **self.case.keywords(),
            )
            for part, kv in zip(self.parts, self.wanted, strict=True)
        ]
        outs, sums = zip(*found, strict=True)
        return torch.cat(outs), torch.cat(sums)


def rows_of(part: Span) -> list[int]:
    """Rows of the cache that a part's tokens have, from its sequence's first."""
    assert part.table is not None
    every = [page * PAGE_TOKENS + row for page in part.table.pages for row in range(PAGE_TOKENS)]
    return every[: part.context + part.length]


def view(rows: CacheRows, row: int) -> Tensor:
    """What a row of the cache holds, [K, D]."""
    page, offset = divmod(row, PAGE_TOKENS)
    first = rows.base.storage_offset() + page * rows.page_stride + offset * rows.token_stride
    return rows.base.as_strided((rows.heads, rows.size), (rows.head_stride, 1), first)
