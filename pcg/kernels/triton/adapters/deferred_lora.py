"""LoRA that emitted kernels add to a product's outputs, for the few tokens of decoding.

    begun_lora           s = x Aᵀ
    with_deferred_lora   the product's outputs, and the summand left for each
    deferred_rows        d[token, column] = Σ_k s[token, k] · Bᵀ[k, column],   s = Σ_part s_part

Where a step is recorded another stream computes s, in a branch of the graph that is parallel to the
base's product and hidden under it. What one fork gave back to the memory
of that stream was read before the next fork, which waits for it. Eager steps have no second stream,
as events would take the host as long as launches.

Tokens that decode take this way (`token_tiles.DECODE_BLOCK`). Each has its own adapter or none: a
program reads the columns of B that it needs for each of its tokens, 8 ranks at a time, or 4 of more
than 4096 columns, and multiplies in fp32 without tensor cores. So a tile may have several tokens,
and a part of the columns twice. For the many tokens of prompts, for adapters in other forms than
rows, and where a token's adapter is wider than `MOST_WIDTH`, LoRA is added to the product
immediately, and nothing is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pcg.kernels.batch import LoraRows
from pcg.kernels.devices import stream_for
from pcg.kernels.triton.adapters import dispatch, segmented_lora
from pcg.kernels.triton.adapters.rank_rows import RankRows
from pcg.kernels.triton.adapters.token_tiles import DECODE_BLOCK, TokenTiles

MOST_WIDTH = 32
"""Width of adapters up to which LoRA is left to other kernels. Of these a program takes whole rows,
and reads 8 ranks of B after the others, about a microsecond each: beyond, a step would wait for one
token longer than a launch takes, where expand has programs for each block of columns."""


@dataclass(frozen=True)
class DeferredLora:
    """LoRA's summand of one output of a product; nothing if the tables are None.

    Attributes:
        number: the output's index among those with LoRA.
        by_token: the adapter of each token, [T, 4] (`token_tiles`).
        s: [parts, outputs, sums], the partial sums of shrink.
        up: the rows of Bᵀ.
    """

    number: int = 0
    by_token: Tensor | None = None
    s: Tensor | None = None
    up: RankRows | None = None

    def __getitem__(self, rows: Tensor) -> DeferredLora:
        return self if self.by_token is None else replace(self, by_token=self.by_token[rows])

    @property
    def pointers(self) -> Sequence[Tensor] | None:
        """The tensors that a kernel gets in place of an output; None without a summand."""
        if self.by_token is None or self.s is None or self.up is None:
            return None
        return self.by_token, self.s, self.up.memory, self.up.rows, self.up.ranks

    @property
    def numbers(self) -> Sequence[int]:
        """The numbers that a kernel gets, `DEFERRED_NUMBERS`."""
        assert self.s is not None
        assert self.up is not None
        (parts, slices, sums), j = self.s.shape, self.number
        return self.up.first + j, j * self.up.slots, j * sums, slices * sums, parts

    @property
    def parts(self) -> int:
        """The least power of two that is no less than the parts of s; 0 without a summand."""
        return 0 if self.s is None else triton.next_power_of_2(len(self.s))


_NOTHING = DeferredLora()


def nothing_deferred() -> DeferredLora:
    """Return an empty summand."""
    return _NOTHING


@dataclass
class BegunLora:
    """The LoRA of a product in progress: the input and the weights, or its summands.

    Attributes:
        left: the summands; None if LoRA has to be added to the product.
        beside: the stream that computes s while another computes the product; None for the same.
    """

    x: Tensor
    a: Sequence[Any]
    b: Sequence[Any]
    left: Sequence[DeferredLora] | None = None
    beside: torch.cuda.Stream | None = None


def begun_lora(x: Tensor, a: Sequence[Any], b: Sequence[Any]) -> BegunLora:
    """Begin the LoRA of x [T, in]; `a` and `b` as `pcg.kernels.torch.lora.add_lora` takes them."""
    begun, lora = BegunLora(x, a, b), a[0]
    if lora is None:
        begun.left = (_NOTHING,) * len(a)
    elif isinstance(lora, LoraRows):
        tiles = dispatch.tiles_of(lora, x)
        is_decode = tiles.block == DECODE_BLOCK and tiles.capacity.tokens >= len(x)
        if lora.tokens.defers and is_decode and tiles.width <= MOST_WIDTH:
            down, up = dispatch.matrices_of(lora)
            s, begun.beside = _shrunk(x, down, tiles)
            left = (DeferredLora(number, tiles.by_token, s, up) for number in range(len(a)))
            begun.left = tuple(left)
    return begun


def _shrunk(
    x: Tensor, down: RankRows, tiles: TokenTiles
) -> tuple[Tensor, torch.cuda.Stream | None]:
    """Return s, and the stream that makes it."""
    if not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        return segmented_lora.shrink(x, down, tiles), None
    beside = stream_for("branch", x.device)
    beside.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(beside):
        return segmented_lora.shrink(x, down, tiles), beside


def with_deferred_lora(begun: BegunLora, y: Tensor, weight: Any) -> Sequence[Any]:
    """Return the outputs of the joined product y [T, outs], and the summands of LoRA."""
    if begun.left is None:
        outputs = dispatch.add_lora(y, begun.x, weight, begun.a, begun.b)
        return *outputs, *(_NOTHING,) * len(begun.a)
    if begun.beside is not None:
        torch.cuda.current_stream(y.device).wait_stream(begun.beside)
    sizes = weight.group_sizes
    return *(y.split(sizes, -1) if len(sizes) > 1 else (y,)), *begun.left


@triton.jit
def deferred_rows(
    by_token, s, memory, rows, ranks, matrix, first_rank, first_sum, part_stride, parts,
    token, column, in_rows, inside,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Return d of tokens [R, 1] and columns [1, C] or [R, C], fp32; 0 where not inside.

    Args:
        by_token: the adapter of each token (`token_tiles`).
        matrix: number of the slice's B among the matrices of each adapter.
        first_rank: the slice's first place in `ranks`, and `first_sum` in a part of s.
        part_stride: elements of a part of s, which has `parts` of them, at most PARTS.
        token: [R, 1], int64; `in_rows` masks those that exist.
        inside: the condition of elements, [R, 1] or [R, C].
    """
    of_16_bytes: tl.constexpr = 128 // memory.dtype.element_ty.primitive_bitwidth
    by_token += 4 * token
    slot = tl.load(by_token, in_rows, -1)
    has_adapter = slot >= 0
    rank = tl.load(ranks + first_rank + slot, has_adapter, 0)
    width = tl.load(by_token + 1, has_adapter, 0)
    entries = rows + tl.load(by_token + 2, has_adapter, 0) + matrix * width
    own_s = s + first_sum + tl.load(by_token + 3, has_adapter, 0)
    total = tl.zeros(inside.shape, tl.float32) * tl.zeros(column.shape, tl.float32)
    part = tl.arange(0, PARTS)[None, :, None]
    # Of wider tiles registers hold fewer: 32 warps have 64 each for a thread.
    AT_ONCE: tl.constexpr = 8 if column.shape[1] <= 4096 else 4
    for first in range(0, tl.max(rank), AT_ONCE):
        k = first + tl.arange(0, AT_ONCE)[None, :]
        kept = k < rank
        row = tl.multiple_of(tl.load(entries + k, kept, 0), [of_16_bytes, of_16_bytes])
        at = row[:, :, None] + column[:, None, :]
        b = tl.load(memory + at, kept[:, :, None] & inside[:, None, :], 0.0)
        each = (own_s + k)[:, None, :] + part * part_stride
        factors = tl.sum(tl.load(each, kept[:, None, :] & (part < parts), 0.0), 1)
        total += tl.sum(b.to(tl.float32) * factors[:, :, None], 1)
    return total
