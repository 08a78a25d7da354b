"""The assembler of Triton's kernels, and a check that it gets Hopper's products right.

Hopper's products (WGMMA) run beside other instructions and read one side from registers. ptxas up
to CUDA 13.2 may give those registers to other values before they are read, and the product is wrong
(triton-lang/triton pull request 11781; CUDA 13.3's release notes). Triton ships two ptxas: up to
3.8 it takes the older one for Hopper, so the newer one is preferred here, and `failure` runs a
product whose bits are known before any program does.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.backends.nvidia.compiler import get_ptxas

FIXED = (13, 3)
"""The first version of ptxas that is known to be right."""
_PATH = "TRITON_PTXAS_PATH"
_HOPPER = 90
_ROWS, _KEYS, _SIZE, _STEPS = 64, 64, 128, 24
"""A tile of attention's product of weights and values, over so many blocks of keys."""


@dataclass(frozen=True)
class Ptxas:
    """An assembler: its path, and its version, as (13, 4)."""

    path: str
    version: tuple[int, ...]

    @property
    def is_fixed(self) -> bool:
        return self.version >= FIXED

    def __str__(self) -> str:
        return f"ptxas {'.'.join(map(str, self.version))} ({self.path})"


def used_ptxas(architecture: int) -> Ptxas:
    """Return the assembler that Triton takes for an architecture, such as 90."""
    return _tool(get_ptxas(architecture))


def prefer_newest() -> None:
    """Have Triton take the newer one of its two assemblers for Hopper.

    `TRITON_PTXAS_PATH`, where it is set, is left as it is: it is the user's choice.
    """
    if os.environ.get(_PATH):
        return
    newest = max((_tool(knobs.nvidia.ptxas), _tool(knobs.nvidia.ptxas_blackwell)), key=_version)
    if newest.version > used_ptxas(_HOPPER).version:
        os.environ[_PATH] = newest.path


def _tool(found: object) -> Ptxas:
    path, version = (getattr(found, name) for name in ("path", "version"))
    return Ptxas(str(path), tuple(map(int, str(version).split("."))))


def _version(ptxas: Ptxas) -> tuple[int, ...]:
    return ptxas.version


@triton.jit
def weighted_values(
    queries, keys, values, out, steps,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """out = Σ over steps of exp2(queries keysᵀ) values, [ROWS, SIZE], the weights in registers.

    As in attention, both products are under way while the weights of a step are computed.
    """
    row = tl.arange(0, ROWS)[:, None]
    key = tl.arange(0, KEYS)[:, None]
    size = tl.arange(0, SIZE)[None, :]
    query = tl.load(queries + row * SIZE + size)
    products = tl.dot(query, tl.trans(tl.load(keys + key * SIZE + size)))
    total = tl.zeros((ROWS, SIZE), tl.float32)
    for step in range(steps):
        weights = tl.exp2(products)
        ahead = (step + 1) * KEYS + key
        products = tl.dot(
            query, tl.trans(tl.load(keys + ahead * SIZE + size, ahead < steps * KEYS))
        )
        value = tl.load(values + (step * KEYS + key) * SIZE + size)
        total = tl.dot(weights.to(value.dtype), value, total)
    tl.store(out + row * SIZE + size, total)


def products(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return what the kernel computes on a device, and what it has to, on the CPU.

    A key has one element that is not 0, so that products are small integers, and weights powers of
    two; values are small integers, too, and every sum is exact.
    """
    count = _STEPS * _KEYS
    seed = torch.Generator().manual_seed(0)
    queries = torch.randint(-2, 3, (_ROWS, _SIZE), generator=seed).float()
    keys = torch.eye(_SIZE)[torch.randint(_SIZE, (count,), generator=seed)]
    values = torch.randint(-4, 5, (count, _SIZE), generator=seed).float()
    out = torch.empty(_ROWS, _SIZE, device=device)
    weighted_values[(1,)](
        *(x.to(device, torch.bfloat16) for x in (queries, keys, values)), out, _STEPS,
        ROWS=_ROWS, KEYS=_KEYS, SIZE=_SIZE, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out, torch.exp2(queries @ keys.mT) @ values


@functools.cache
def failure(device: torch.device) -> str | None:
    """Return what is wrong with products on a GPU, and the fix; None where they are right.

    It waits for the device, once. GPUs before and after Hopper have other products.
    """
    if torch.cuda.get_device_capability(device)[0] != _HOPPER // 10:
        return None
    prefer_newest()
    found, exact = products(device)
    if torch.equal(found.cpu(), exact):
        return None
    return (
        f"{used_ptxas(_HOPPER)} gets products of Hopper's tensor cores wrong; install a Triton "
        f"with ptxas {'.'.join(map(str, FIXED))} or later, or set {_PATH} to one"
    )
