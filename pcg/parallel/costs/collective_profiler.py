"""Measurement of collectives between ranks: NCCL on GPUs, else gloo.

Ranks of a single machine are started for the measurement; ranks of torchrun measure between
themselves. On several machines, the ranks of each machine are also measured separately.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from pcg.errors import CostModelError
from pcg.parallel.costs.device_profile import CollectiveTime
from pcg.ranks.group import Ranks

SIZES = tuple(2**power for power in range(6, 25, 3))
"""Sizes of the whole tensor, up to 16 MiB."""
QUICK_SIZES = (2**8, 2**14, 2**20)

_WARM = 3
_REPEATS = 10


def measure_collectives(
    degree: int, device: torch.device, *, quick: bool = False
) -> tuple[tuple[CollectiveTime, ...], str]:
    """Measure the times of collectives over `degree` processes; also return their backend.

    Raises:
        CostModelError: fewer GPUs than ranks.
    """
    if degree < 2:
        raise CostModelError(f"collectives of {degree} rank cost nothing; measure at least 2")
    on_gpus = device.type == "cuda"
    if on_gpus and torch.cuda.device_count() < degree:
        raise CostModelError(
            f"{degree} ranks need as many GPUs, and torch sees {torch.cuda.device_count()}; "
            "measure fewer, or on the CPU with --device cpu"
        )
    backend = "nccl" if on_gpus else "gloo"
    with tempfile.TemporaryDirectory() as directory:
        arguments = (degree, backend, directory, QUICK_SIZES if quick else SIZES)
        spawn(_rank, arguments, nprocs=degree)
        rows: list[dict[str, Any]] = json.loads((Path(directory) / "found").read_text())
    return tuple(CollectiveTime(**row) for row in rows), backend


def _rank(rank: int, degree: int, backend: str, directory: str, sizes: tuple[int, ...]) -> None:
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = f"file://{directory}/store"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=degree)
    try:
        times = _times(degree, device, sizes, None)
        if rank == 0:
            (Path(directory) / "found").write_text(
                json.dumps([asdict(measured) for measured in times])
            )
    finally:
        dist.destroy_process_group()


def exchanges_between(
    ranks: Ranks, device: torch.device, *, quick: bool = False
) -> tuple[tuple[CollectiveTime, ...], str]:
    """Measure collectives between running ranks, all of which call this; also return the backend.

    With several machines, times within a machine of torchrun's `LOCAL_WORLD_SIZE` ranks come first.
    """
    sizes = QUICK_SIZES if quick else SIZES
    node = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.size))
    exchanges: list[CollectiveTime] = []
    if 1 < node < ranks.size and ranks.size % node == 0:
        first = range(0, ranks.size, node)
        groups = [dist.new_group(list(range(rank, rank + node))) for rank in first]
        exchanges += _times(node, device, sizes, groups[ranks.rank // node])
    exchanges += _times(ranks.size, device, sizes, None)
    return tuple(exchanges), str(dist.get_backend())


def _times(
    degree: int, device: torch.device, sizes: tuple[int, ...], group: dist.ProcessGroup | None
) -> list[CollectiveTime]:
    """Measure collectives over a group of `degree` ranks; None for all ranks."""
    times = []
    for size in sizes:
        # Whole parts of fp32 for each rank.
        part = torch.ones(-(-size // (4 * degree)), device=device)
        whole = part.repeat(degree)
        size_bytes = 4 * whole.numel()
        for kind, call in _calls(part, whole, degree, group).items():
            seconds = _seconds(call, device, group)
            times.append(CollectiveTime(kind, size_bytes, degree, seconds))
    return times


def _calls(
    part: Tensor, whole: Tensor, degree: int, group: dist.ProcessGroup | None
) -> dict[str, Callable[[], Any]]:
    parts, output, most = list(whole.chunk(degree)), torch.empty_like(part), dist.ReduceOp.MAX
    other = torch.empty_like(whole)
    return {
        "all_gather": lambda: dist.all_gather(parts, part, group),
        "all_reduce": lambda: dist.all_reduce(whole, most, group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter(output, parts, most, group),
    }


def _seconds(
    call: Callable[[], Any], device: torch.device, group: dist.ProcessGroup | None
) -> float:
    """Return the seconds of a call, the median of three rows of calls."""
    for _ in range(_WARM):
        call()
    rows = []
    for _ in range(3):
        dist.barrier(group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(_REPEATS):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        rows.append((time.perf_counter() - start) / _REPEATS)
    return sorted(rows)[1]
