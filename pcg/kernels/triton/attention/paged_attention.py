"""Launch attention's kernels (`forward_kernels`, `backward_kernels`) for a batch.

Rows and keys are cut into programs by head size, dtype and architecture: each takes the most rows
or keys with sums that stay in registers, with any options.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from pcg.errors import UnsupportedError
from pcg.kernels.batch import KvGradients
from pcg.kernels.sizes import HEAD_SIZES, PAGE_TOKENS
from pcg.kernels.torch.attention_math import Scoring
from pcg.kernels.triton.attention.backward_kernels import delta_rows, key_gradients, query_gradients
from pcg.kernels.triton.attention.cache_rows import KvRows
from pcg.kernels.triton.attention.forward_kernels import attend_splits, attend_tiles, reduce_splits
from pcg.kernels.triton.attention.work import KEY_BLOCK, SPLIT_KEYS, TILE_ROWS, AttentionWork

SMALL = (86, 89, 120, 121)
"""Architectures whose programs have 99 KiB of shared memory at most, as of GeForce."""
HOPPER = 90
"""The architecture whose products run beside other instructions of the warps that ask for them."""


def has_wide_products(architecture: int) -> bool:
    """Return whether products read weights from shared memory: of data centers, since Hopper."""
    return HOPPER <= architecture < 120


_ALL_REGISTERS = 255
"""Of a thread. ptxas spills a little for one more program on a processor, which small ones have no
shared memory for: of heads above 64, two programs of four warps or one of eight."""


class Blocks(NamedTuple):
    """Rows, keys of a step or of a program of dk and dv, warps, stages, AHEAD of the forward.

    `registers` of a thread may be used; None leaves it to ptxas.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    ahead: bool = False
    registers: int | None = None

    @property
    def options(self) -> dict[str, int | None]:
        return {"num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.registers}


def tile_blocks(size: int, dtype: torch.dtype, paged: bool, architecture: int) -> Blocks:
    """Return the blocks of `attend_tiles` on an architecture, such as 80.

    Of heads up to 128 two programs of 64 rows share a processor, so that products of one run while
    the other one waits for its softmax, or for all of its products. On Hopper a program requests
    products ahead, too: 16 KiB more, and no more registers than the same two programs have. Heads
    up to 64 have three to four programs without, and two with it.

    Args:
        size: elements of a head, the larger of keys' and values', a power of two.
        dtype: q's dtype; fp32 is multiplied without tensor cores.
        paged: True if keys and values lie in pages: reading the block table takes a further stage.
    """
    if dtype == torch.float32:
        return Blocks(32, 32, 4 if size <= 64 else 8 if size <= 128 else 16, 1)
    stages = 3 if paged else 2
    ahead = architecture == HOPPER and size > 64
    registers = _ALL_REGISTERS if architecture in SMALL and size > 64 else None
    if size > 128:
        return Blocks(64, 32, 8, stages, ahead, registers)
    # Other products read weights and values from registers, which 64 keys of 128 would fill.
    keys = 64 if size <= 64 or has_wide_products(architecture) else 32
    return Blocks(64, keys, 4, stages, ahead, registers)


def split_blocks(size: int, dtype: torch.dtype, group: int) -> Blocks:
    """Return the blocks of `attend_splits`; arguments are those of `tile_blocks`.

    64 keys and values of a head of 128 are 32 KiB, read as four pages each, and one such step is in
    flight while another is processed; with four programs on a processor that hides the memory's
    latency.
    """
    if dtype == torch.float32:
        return Blocks(16, 32 if size <= 128 else 16, 4, 1)
    return Blocks(16 if group <= 16 else 32, 64 if size <= 128 else 32, 4, 3)


def query_blocks(size: int, dtype: torch.dtype, paged: bool, architecture: int) -> Blocks:
    """Return the blocks of `query_gradients`; arguments are those of `tile_blocks`.

    Hopper's products read both sides from shared memory, Ampere's from registers.
    """
    if dtype == torch.float32:
        return Blocks(32, 32, 8, 1) if size <= 64 else Blocks(16, 16, 8, 1)
    stages = 3 if paged else 2
    if size <= (128 if has_wide_products(architecture) else 64):
        return Blocks(128, 64, 8, stages)
    if size > 128 and architecture in SMALL:
        return Blocks(32, 32, 8, 2, registers=_ALL_REGISTERS)
    return Blocks(64, 64 if size <= 128 else 32, 8, stages)


def key_blocks(size: int, dtype: torch.dtype, architecture: int) -> Blocks:
    """Return the blocks of `key_gradients`, with two sums; arguments are those of `query_blocks`.

    Heads of 256 get 32 keys: too few for Hopper's products of 64 rows, which use `HMMA` then.
    """
    if dtype == torch.float32:
        return Blocks(16, 16, 8 if size <= 128 else 16, 1)
    if size > 128:
        return Blocks(32, 32, 8, 2)
    if not has_wide_products(architecture):
        return Blocks(32, 64, 8, 2)
    return Blocks(64, 128 if size <= 64 else 64, 8, 2)


def architecture_of(x: Tensor) -> int:
    """Return 80 for sm_80 and so on; in the interpreter, the newest."""
    if not x.is_cuda:
        return 90
    major, minor = torch.cuda.get_device_capability(x.device)
    return 10 * major + minor


_DELTA_ROWS = 32
"""Rows of a program of `delta_rows`."""


def paged_attention(
    q: Tensor, kv: KvRows, work: AttentionWork, scoring: Scoring, keeps: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Compute attention of every token to its sequence; see the operator of that name.

    Args:
        q: [T, H, D], any strides but the last.
        kv: the layer's cache, the batch's keys and values included, or only these.
        work: the batch's lists.
        scoring: the options of scores.
        keeps: True if backward needs the log-sum-exp.
    Returns:
        out [T, H, Dv] in q's dtype, undefined for tokens of no part or zeros (see `work`), and with
        `keeps` the log-sum-exp [T, H] in fp32.
    Raises:
        UnsupportedError: no kernel knows the heads or the scale, or only one of keys and work has
            pages.
    """
    keys, values = kv
    if scoring.scale <= 0.0:
        raise UnsupportedError(
            f"attention kernels want a scale above 0, and it is {scoring.scale}: compile with "
            "backend='torch'"
        )
    if keys.paged != (work.pages.shape[1] > 0):
        raise UnsupportedError(
            f"keys {'in' if keys.paged else 'without'} pages, but block tables of "
            f"{work.pages.shape[1]} columns; build the lists from spans with their block tables"
        )
    tokens, heads, _ = q.shape
    sizes = head_constants(q, kv)
    new = q.new_zeros if work.has_others else q.new_empty
    out = new((tokens, heads, values.size))
    lse = new((tokens, heads), dtype=torch.float32) if keeps else None
    alibi, sinks = scoring.alibi, scoring.sinks
    options = score_constants(work, scoring)
    strides = (*q.stride()[:2], *kv.strides, work.pages.shape[1], scoring.scale)
    size = max(sizes["BLOCK_D"], sizes["BLOCK_DV"])
    if len(work.tiles):
        blocks = tile_blocks(size, q.dtype, keys.paged, architecture_of(q))
        attend_tiles[(len(work.tiles) * (TILE_ROWS // blocks.rows), keys.heads)](
            q, keys.base, values.base, out, lse, alibi, sinks, work.parts, work.pages, work.tiles,
            *strides, **sizes, **options,
            BLOCK_M=blocks.rows, BLOCK_N=blocks.keys, TILE=TILE_ROWS,
            SINKS=sinks is not None, LSE=keeps, PAGED=keys.paged, AHEAD=blocks.ahead,
            **blocks.options,
        )  # fmt: skip
    if len(work.splits):
        blocks = split_blocks(size, q.dtype, sizes["G"])
        count = len(work.splits)
        partial = 0 if work.capacity.is_whole else count
        totals = q.new_empty((partial, heads, values.size), dtype=torch.float32)
        highest, sums = q.new_empty((2, partial, heads), dtype=torch.float32)
        attend_splits[(count, keys.heads, triton.cdiv(sizes["G"], blocks.rows))](
            q, keys.base, values.base, totals, highest, sums, out, lse, alibi, sinks, work.parts,
            work.pages, work.splits, *strides, **sizes, **options,
            BLOCK_H=blocks.rows, BLOCK_N=blocks.keys, SINKS=sinks is not None, LSE=keeps,
            SPLIT=SPLIT_KEYS, **blocks.options,
        )  # fmt: skip
    if len(work.splits) and not work.capacity.is_whole:
        reduce_splits[(len(work.decodes), heads)](
            totals, highest, sums, out, lse, sinks, work.parts, work.decodes,
            H=heads, DV=values.size, BLOCK_DV=sizes["BLOCK_DV"], BLOCK_S=8,
            COLUMNS=options["COLUMNS"], REACH=scoring.reach, SINKS=sinks is not None, LSE=keeps,
            SPLIT=SPLIT_KEYS, num_warps=2,
        )  # fmt: skip
    return out, lse


def paged_attention_backward(
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    kv: KvRows,
    work: AttentionWork,
    scoring: Scoring,
    sums: KvGradients | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv of attention; see `paged_attention`; its lse holds the sinks' weight.

    Args:
        dout: gradient by out, [T, H, Dv], any strides but the last.
        out: [T, H, Dv], likewise.
        lse: [T, H], fp32.
        work: the batch's lists, built for backward.
        sums: the layer's gradients of all keys and values of the pass, in fp32, to which the
            batch's are added; for keys and values in a cache.
    Returns:
        [T, H, D], [T, K, D] and [T, K, Dv] in q's dtype: with sums, the final gradients.
    Raises:
        UnsupportedError: the work is not for backward, or there are sums without a cache.
    """
    if not len(work.key_blocks):
        raise UnsupportedError("these lists are for forward alone; build them with backward=True")
    keys, values = kv
    if keys.paged != (sums is not None):
        raise UnsupportedError("sums are for keys and values in a cache, and needed with one alone")
    tokens, heads, _ = q.shape
    sizes = head_constants(q, kv)
    delta = torch.empty_like(lse)
    delta_rows[(triton.cdiv(tokens * heads, _DELTA_ROWS),)](
        dout, out, delta, tokens * heads, *dout.stride()[:2], *out.stride()[:2],
        H=heads, DV=values.size, BLOCK_DV=sizes["BLOCK_DV"], BLOCK=_DELTA_ROWS, num_warps=4,
    )  # fmt: skip
    new = q.new_zeros if work.has_others else q.new_empty
    dq = new(q.shape)
    dk, dv = (new((tokens, x.heads, x.size)) for x in kv)
    strides = (*q.stride()[:2], *dout.stride()[:2], *kv.strides)
    options = score_constants(work, scoring) | {"PAGED": keys.paged}
    size = max(sizes["BLOCK_D"], sizes["BLOCK_DV"])
    blocks = query_blocks(size, q.dtype, keys.paged, architecture_of(q))
    query_gradients[(len(work.tiles) * (TILE_ROWS // blocks.rows), keys.heads)](
        q, keys.base, values.base, dout, lse, delta, dq, scoring.alibi, work.parts, work.pages,
        work.tiles, *strides, work.pages.shape[1], scoring.scale, **sizes, **options,
        BLOCK_M=blocks.rows, BLOCK_N=blocks.keys, TILE=TILE_ROWS,
        **blocks.options,
    )  # fmt: skip
    blocks = key_blocks(size, q.dtype, architecture_of(q))
    keys_sum, values_sum = (None, None) if sums is None else (sums.keys, sums.values)
    key_gradients[(len(work.key_blocks) * (KEY_BLOCK // blocks.keys), keys.heads)](
        q, keys.base, values.base, dout, lse, delta, dk, dv, keys_sum, values_sum, scoring.alibi,
        work.parts, work.pages, work.key_blocks, *strides, work.pages.shape[1], scoring.scale,
        **sizes, **options, BLOCK_M=blocks.rows, BLOCK_N=blocks.keys, TILE=KEY_BLOCK,
        **blocks.options,
    )  # fmt: skip
    return dq, dk, dv


def score_constants(work: AttentionWork, scoring: Scoring) -> dict[str, float]:
    """Return the constants of lists and scores that kernels are specialised by."""
    return {
        "COLUMNS": work.tiles.shape[1],
        "REACH": scoring.reach,
        "SOFTCAP": scoring.softcap,
        "ALIBI": scoring.alibi is not None,
        "PAGE": PAGE_TOKENS,
    }


def head_constants(q: Tensor, kv: KvRows) -> dict[str, int]:
    """Return the constants of heads that kernels are specialised by: numbers, sizes, padded sizes.

    Raises:
        UnsupportedError: a head has another size, or KV heads do not share the heads evenly.
    """
    (heads, size), (keys, values) = q.shape[1:], kv
    for head_size in (size, values.size):
        if head_size not in HEAD_SIZES:
            raise UnsupportedError(
                f"attention kernels know no heads of {head_size}; the sizes are "
                f"{', '.join(map(str, HEAD_SIZES))}: compile with backend='torch'"
            )
    if heads % keys.heads:
        raise UnsupportedError(f"{keys.heads} KV heads cannot serve {heads} heads evenly")
    return {
        "H": heads,
        "G": heads // keys.heads,
        "D": size,
        "DV": values.size,
        "BLOCK_D": triton.next_power_of_2(size),
        "BLOCK_DV": triton.next_power_of_2(values.size),
    }
