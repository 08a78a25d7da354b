"""The cuts of rows and keys into programs of attention, by head size, dtype and architecture.

Each takes the most rows or keys whose sums stay in registers, with any options.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

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

    `registers` of a thread are used freely, up to so many; None leaves it to ptxas.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    ahead: bool = False
    registers: int | None = None

    @property
    def options(self) -> dict[str, int | None]:
        """The options of a launch."""
        return {
            "num_warps": self.warps,
            "num_stages": self.stages,
            "maxnreg": self.registers,
        }


def tile_blocks(size: int, dtype: torch.dtype, paged: bool, architecture: int) -> Blocks:
    """The blocks of `attend_tiles` on an architecture, such as 80.

    Of heads up to 128 two programs of 64 rows share a processor, so that one's products run while
    the other one waits for its softmax, or for all of its own products. On Hopper a program asks
    for products ahead, too: 16 KiB more, and no more than the same two programs have registers for.
    Heads up to 64 have three to four programs without, and two with it.

    Args:
        size: elements of a head, the larger of keys' and values', a power of two.
        dtype: q's dtype; fp32 is multiplied without tensor cores.
        paged: True if keys and values lie in pages: to read the block table is one stage more.
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
    """The blocks of `attend_splits`; arguments as of `tile_blocks`.

    64 keys and values of a head of 128 are 32 KiB, read as four pages each, and one such step is
    in flight while another is worked on; with four programs on a processor that hides the memory's
    latency.
    """
    if dtype == torch.float32:
        return Blocks(16, 32 if size <= 128 else 16, 4, 1)
    return Blocks(16 if group <= 16 else 32, 64 if size <= 128 else 32, 4, 3)


def query_blocks(size: int, dtype: torch.dtype, paged: bool, architecture: int) -> Blocks:
    """The blocks of `query_gradients`; arguments as of `tile_blocks`.

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
    """The blocks of `key_gradients`, which have two sums; arguments as of `query_blocks`.

    Heads of 256 get 32 keys: too few for Hopper's products of 64 rows, which take `HMMA` then.
    """
    if dtype == torch.float32:
        return Blocks(16, 16, 8 if size <= 128 else 16, 1)
    if size > 128:
        return Blocks(32, 32, 8, 2)
    if not has_wide_products(architecture):
        return Blocks(32, 64, 8, 2)
    return Blocks(64, 128 if size <= 64 else 64, 8, 2)


def architecture_of(x: Tensor) -> int:
    """80 for sm_80 and so on; in the interpreter, the newest."""
    if not x.is_cuda:
        return 90
    major, minor = torch.cuda.get_device_capability(x.device)
    return 10 * major + minor
