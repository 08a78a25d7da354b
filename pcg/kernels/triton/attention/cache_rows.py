"""The places of keys and values, and the kernel that writes a step's into the cache.

The kernel is for attention with keys that no emitted kernel computes; emitted kernels append keys
themselves.

Token j of a sequence lies in page p = table[j // PAGE], row o = j % PAGE of it: element d of head h
is at p · page_stride + h · head_stride + o · token_stride + d. That describes [K, rows, D] as well
as an arena of pages. Without a cache it is token start + j of the batch, and there are no pages.

Shapes: T tokens, K KV heads, D sizes of a head. Grid of `append`: blocks of tokens, KV heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Self

import triton
import triton.language as tl
from torch import Tensor

from pcg.kernels.sizes import PAGE_TOKENS

_APPENDED_TOKENS = 16
"""Tokens of a program of `append`."""


@dataclass(frozen=True)
class CacheRows:
    """The keys or values of a layer.

    `size` is that of a head; strides are in elements from the first of `base`. Without pages
    the token stride is the batch's, and the page stride is 0.
    """

    base: Tensor
    heads: int
    size: int
    page_stride: int
    head_stride: int
    token_stride: int

    @classmethod
    def of_layer(cls, cached: Tensor) -> Self:
        """Describe a layer's cache, [K, rows, D], or separate pages, [pages, K, tokens, D]."""
        heads, _, size = cached.shape[-3:]
        head, token, _ = cached.stride()[-3:]
        page = cached.stride(0) if cached.dim() == 4 else PAGE_TOKENS * token
        return cls(cached, heads, size, page, head, token)

    @classmethod
    def of_batch(cls, x: Tensor) -> Self:
        """Describe the keys or values of a batch that keeps no cache, [T, K, D]."""
        token, head, _ = x.stride()
        return cls(x, x.shape[1], x.shape[2], 0, head, token)

    @property
    def paged(self) -> bool:
        return self.page_stride > 0

    @property
    def strides(self) -> tuple[int, int, int]:
        return self.page_stride, self.head_stride, self.token_stride


class KvRows(NamedTuple):
    """The keys and values of a layer."""

    keys: CacheRows
    values: CacheRows

    @property
    def strides(self) -> tuple[int, ...]:
        return *self.keys.strides, *self.values.strides


@triton.jit(do_not_specialize=["tokens"])
def append_rows(
    k, v, slots, keys, values, tokens, k_token, k_head, v_token, v_head,
    key_page, key_head, key_token, value_page, value_head, value_token,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_T: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """cache[slots[t]] = k[t], v[t]; tokens with negative slots are skipped."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1)
    slot = tl.load(slots + t, t < tokens, -1)
    kept = slot >= 0
    page = slot // PAGE
    row = slot % PAGE
    token = t.to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    inside = kept[:, None] & (d < D)[None, :]
    x = tl.load(k + (token * k_token + head * k_head)[:, None] + d[None, :], inside, 0.0)
    place = page * key_page + row * key_token + head.to(tl.int64) * key_head
    tl.store(keys + place[:, None] + d[None, :], x, inside)
    d = tl.arange(0, BLOCK_DV)
    inside = kept[:, None] & (d < DV)[None, :]
    x = tl.load(v + (token * v_token + head * v_head)[:, None] + d[None, :], inside, 0.0)
    place = page * value_page + row * value_token + head.to(tl.int64) * value_head
    tl.store(values + place[:, None] + d[None, :], x, inside)


def append(k: Tensor, v: Tensor, slots: Tensor, kv: KvRows) -> None:
    """Write the tokens' keys and values into the cache.

    Args:
        k: [T, K, D], of any strides but the last.
        v: [T, K, Dv], likewise.
        slots: row of the cache of each token, page · PAGE_TOKENS + row, [T], int64; negative for
            tokens that fill a captured graph's batch up, which are not written.
        kv: the layer's cache.
    """
    (keys, values), tokens = kv, k.shape[0]
    append_rows[(triton.cdiv(tokens, _APPENDED_TOKENS), keys.heads)](
        k, v, slots, keys.base, values.base, tokens, *k.stride()[:2], *v.stride()[:2], *kv.strides,
        D=keys.size, DV=values.size, BLOCK_D=triton.next_power_of_2(keys.size),
        BLOCK_DV=triton.next_power_of_2(values.size),
        BLOCK_T=_APPENDED_TOKENS, PAGE=PAGE_TOKENS, num_warps=4,
    )  # fmt: skip
