"""The assembler of Triton's kernels, and a check that it gets Hopper's products right.

Hopper's products (WGMMA) run parallel to other instructions and read a side from registers. Some
versions of ptxas give those registers to other values before they are read, and the product is
wrong (triton-lang/triton pull request 11781). The versions differ by kernel, so no version decides:
`failure` runs a product of known bits before any program runs.

Triton reads the version of its assembler once in a process, for the keys of its cache, so that the
assembler must not change there once a kernel is compiled. It is chosen before:

    PCG_PTXAS            names it, for every GPU; `TRITON_PTXAS_PATH` does, too
    neither              Triton's. On Hopper, where a newer version is installed, each is tried in a
                         separate process, `python -m pcg.kernels.triton.ptxas cuda:0`, and the
                         first is taken whose products are right
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.backends.nvidia.compiler import get_ptxas, get_ptxas_version

from pcg.kernels.devices import on_device
from pcg.kernels.triton import CHOICE, TRITONS, choose_assembler

_HOPPER = 90
_TRIAL_S = 120.0
"""Time of a trial: torch, a device's context and one kernel."""
_ROWS, _KEYS, _SIZE, _STEPS = 64, 64, 128, 24
"""A tile of attention's product of weights and values, over so many blocks of keys."""


@dataclass(frozen=True)
class Ptxas:
    """An assembler: its path, and its version, as (13, 4)."""

    path: str
    version: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"ptxas {'.'.join(map(str, self.version))}"

    def __str__(self) -> str:
        return f"{self.name} ({self.path})"


def used_ptxas(architecture: int) -> Ptxas:
    """Return the assembler that Triton takes for an architecture, such as 90."""
    return _tool(get_ptxas(architecture))


def assemblers(architecture: int) -> list[Ptxas]:
    """Return the assembler that Triton takes, then the newer ones of this machine, newest first.

    Candidates are those that Triton ships, and CUDA's at `CUDA_HOME`, /usr/local/cuda and on the
    PATH.
    """
    used = used_ptxas(architecture)
    shipped = Path(triton.__file__).parent / "backends/nvidia/bin"
    homes = (os.environ.get("CUDA_HOME"), "/usr/local/cuda")
    paths = [
        *(shipped / name for name in ("ptxas", "ptxas-blackwell")),
        *(Path(home) / "bin/ptxas" for home in homes if home),
        *([Path(on_path)] if (on_path := shutil.which("ptxas")) else []),
    ]
    by_version: dict[tuple[int, ...], Ptxas] = {}
    for path in paths:
        candidate = _at(str(path))
        if candidate is not None and candidate.version > used.version:
            by_version.setdefault(candidate.version, candidate)
    return [used, *(by_version[version] for version in sorted(by_version, reverse=True))]


def _at(path: str) -> Ptxas | None:
    try:
        tool = knobs.NvidiaTool.from_path(path)
    except OSError:  # of another machine, or not to be run
        return None
    return None if tool is None else _tool(tool)


def _tool(tool: object) -> Ptxas:
    path, version = (getattr(tool, name) for name in ("path", "version"))
    return Ptxas(str(path), tuple(map(int, str(version).split("."))))


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
    """Return the kernel's result on a device, and the exact result, on the CPU.

    A key has a single element other than 0, so that products are small integers, and weights powers
    of two; values are small integers, too, and every sum is exact.
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


def _is_right(device: torch.device) -> bool:
    with on_device(device):
        result, exact = products(device)
    return torch.equal(result.cpu(), exact)


def is_right_apart(assembler: Ptxas, device: torch.device) -> bool:
    """Return whether an assembler gets the product right, tried in a separate process."""
    command = [sys.executable, "-m", __name__, str(device)]
    path = os.pathsep.join(filter(None, sys.path))  # pcg need not be installed
    environment = {**os.environ, CHOICE: assembler.path, "PYTHONPATH": path}
    try:
        trial = subprocess.run(
            command, env=environment, capture_output=True, timeout=_TRIAL_S, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return trial.returncode == 0


def _settle(device: torch.device) -> None:
    """Choose the assembler of this process, unless the user has, or a kernel is compiled."""
    is_compiled = get_ptxas_version.cache_info().currsize > 0
    if is_compiled or any(map(os.environ.get, TRITONS)):
        return
    candidates = assemblers(_HOPPER)
    others = len(candidates) > 1
    right = next(
        (candidate for candidate in candidates if others and is_right_apart(candidate, device)),
        None,
    )
    if right is not None:
        choose_assembler(right.path)


@functools.cache
def failure(device: torch.device) -> str | None:
    """Return the fault of the assembler or its products, and the fix; None if all is right.

    It chooses the assembler, and waits for the device, once. GPUs before and after Hopper have
    other products.
    """
    major, minor = torch.cuda.get_device_capability(device)
    architecture = 10 * major + minor
    if architecture == _HOPPER:
        _settle(device)
    for path in filter(None, map(os.environ.get, TRITONS)):
        if _at(path) is None:  # Triton takes its own then, and says nothing, or fails
            return f"{path} is no ptxas that runs here; set {CHOICE} to another, or to nothing"
    if architecture != _HOPPER or _is_right(device):
        return None
    return (
        f"{used_ptxas(_HOPPER)} gets products of Hopper's tensor cores wrong, as the self-test "
        f"shows; set {CHOICE} to another ptxas, such as backends/nvidia/bin/ptxas-blackwell of "
        "Triton 3.9, which may be used with an earlier Triton"
    )


if __name__ == "__main__":
    sys.exit(0 if _is_right(torch.device(sys.argv[1])) else 1)
