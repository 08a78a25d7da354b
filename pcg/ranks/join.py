"""Joining the ranks of a job: this process finds the others that torchrun or `pcg` has started."""

from __future__ import annotations

import atexit
import contextlib
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from pcg.errors import ParallelError
from pcg.ranks.group import ROLL_CALL_S, SINGLE_RANK, ProcessRanks, Ranks
from pcg.ranks.mesh import AXES, SINGLE_MESH, MeshSizes, RankMesh, members

TIMEOUT_S = 300
"""The longest time that a rank waits for the others, which may load their weights more slowly, if
no other time is asked for."""
MOST_TIMEOUT_S = 10**7


def join_group(degree: int, device: torch.device, timeout_s: float | None = None) -> Ranks:
    """Join a job of `degree` ranks in a single tensor-parallel group; see `join_mesh`."""
    return join_mesh(MeshSizes(tp=degree), device, timeout_s).tp


def join_mesh(sizes: MeshSizes, device: torch.device, timeout_s: float | None = None) -> RankMesh:
    """Join a job of ranks along each axis; this process, with its device, is a rank.

    Args:
        timeout_s: the longest time that a rank waits for the others; `TIMEOUT_S` by default.
    Raises:
        ParallelError: the number of processes differs, another rank has this GPU, or the time is
            invalid.
    """
    _check_timeout(sizes.world, timeout_s)
    if sizes.world == 1:
        return SINGLE_MESH
    timeout = timedelta(seconds=TIMEOUT_S if timeout_s is None else timeout_s)
    store: Any = None
    if not dist.is_initialized():
        if started_ranks() == 1:
            check_started(sizes)
        store, rank, size = next(rendezvous("env://", timeout=timeout))
        _check_alike(store, rank, size, f"{sizes} on {device.type}")
        if device.type == "cuda":
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            check_own_gpu(store, rank, size, uuid)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
        atexit.register(_leave)
    if dist.get_world_size() != sizes.world:
        raise ParallelError(_not_so_many(sizes, dist.get_world_size()))
    return _mesh(sizes, device, store, timeout)


def sizes_of(tp: int, dp: int | None, cp: int = 1, pp: int = 1) -> MeshSizes:
    """Return the sizes of a job: as many replicas as the processes make, unless `dp` is given.

    With a `tp`, a `cp` and a `pp` of 1 and no `dp` a process is a job by itself, even under
    torchrun.
    """
    each = MeshSizes(pp=pp, cp=cp, tp=tp).world
    present = present_ranks()
    if dp is None:
        dp = max(present // each, 1) if each > 1 and present % each == 0 else 1
    return MeshSizes(pp=pp, dp=dp, cp=cp, tp=tp)


def _mesh(sizes: MeshSizes, device: torch.device, store: Any, timeout: timedelta) -> RankMesh:
    groups: dict[tuple[int, ...], Ranks] = {}

    def group(*axes: str) -> Ranks:
        chosen: Ranks = SINGLE_RANK
        for numbers in members(sizes, axes):
            key, is_own = tuple(numbers), dist.get_rank() in numbers
            if len(numbers) > 1 and key not in groups:
                process_group = dist.new_group(numbers, timeout=timeout)
                groups[key] = SINGLE_RANK
                if is_own:
                    groups[key] = ProcessRanks(process_group, device, store, numbers, sizes.world)
            if is_own:
                chosen = groups.get(key, SINGLE_RANK)
        return chosen

    of_axes: dict[str, Any] = {axis: group(axis) for axis in AXES}
    of_axes |= {"world": group(*AXES), "data": group("dp", "cp"), "model": group("pp", "tp")}
    of_axes["replica"] = group("pp", "cp", "tp")
    of_axes["pp"].tell(b" ")  # the first message of a group has to be one of all its ranks
    return RankMesh(sizes, **of_axes)


def _check_timeout(world: int, timeout_s: float | None) -> None:
    if timeout_s is None:
        return
    if world == 1:
        raise ParallelError(
            f"rank_timeout_s={timeout_s!r} has no effect with tp=1, which waits for no other rank; "
            "give tp=2 or more (--tp 2), or leave it out"
        )
    is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if not is_number or not 0 < timeout_s <= MOST_TIMEOUT_S:
        raise ParallelError(
            f"rank_timeout_s={timeout_s!r}; use seconds above 0, up to {MOST_TIMEOUT_S}"
        )


def check_started(sizes: MeshSizes) -> None:
    """Raise a ParallelError in a process that is not a rank of that many."""
    size = present_ranks()
    if size != sizes.world:
        raise ParallelError(_not_so_many(sizes, size))


def present_ranks() -> int:
    """Return the number of processes of this job: of torch.distributed, else as started."""
    return dist.get_world_size() if dist.is_initialized() else started_ranks()


def _check_alike(store: Any, rank: int, size: int, wanted: str) -> None:
    """Raise a ParallelError on every rank if ranks want another size or kind of device."""
    store.set(f"pcg/asked/{rank}", wanted)
    asked = [store.get(f"pcg/asked/{other}").decode() for other in range(size)]
    if len(set(asked)) > 1:
        store.set(f"pcg/heard/{rank}", "all")
        with contextlib.suppress(RuntimeError):  # the rank that keeps the store ends last
            heard = [f"pcg/heard/{other}" for other in range(size)]
            store.wait(heard, timedelta(seconds=ROLL_CALL_S))
        each = ", ".join(f"rank {other} {text}" for other, text in enumerate(asked))
        raise ParallelError(
            f"{size} ranks have to ask for the same group, and ask for: {each}; give all of them "
            f"the same sizes, such as tp={size}, and the same kind of device"
        )


def check_own_gpu(store: Any, rank: int, size: int, uuid: str) -> None:
    """Raise an error if two ranks share a GPU, as `device="cuda:0"` on all of them would.

    Args:
        store: a store that all ranks share.
        uuid: the UUID of this rank's GPU.
    Raises:
        ParallelError: on every rank; names those that share a GPU.
    """
    store.set(f"pcg/gpu/{rank}", uuid)
    owners: dict[str, list[int]] = {}
    for other in range(size):
        owners.setdefault(store.get(f"pcg/gpu/{other}").decode(), []).append(other)
    shared = [ranks for ranks in owners.values() if len(ranks) > 1]
    if shared:
        raise ParallelError(
            f"{size} ranks need a GPU each, and ranks {', '.join(map(str, shared[0]))} have the "
            'same one; use device="cuda", which gives each its own by torchrun\'s LOCAL_RANK'
        )


def started_ranks() -> int:
    """Return the number of processes that torchrun has started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", 1)) if "RANK" in os.environ else 1


def own_device(device: torch.device) -> torch.device:
    """Return the rank's device: torchrun's LOCAL_RANK numbers the GPUs.

    A GPU with a number, as "cuda:1", is kept; `join_group` refuses a GPU of two ranks.

    Raises:
        ParallelError: the machine has fewer GPUs than ranks.
    """
    if device.type != "cuda":
        return device
    if device.index is not None:
        if present_ranks() > 1:  # NCCL works on this thread's current GPU
            torch.cuda.set_device(device)
        return device
    local, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if local >= count:
        raise ParallelError(
            f"rank {local} of this machine has no GPU: there are {count}; start as many ranks as "
            'there are, or use device="cpu"'
        )
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    return device


def _not_so_many(sizes: MeshSizes, size: int) -> str:
    flags = " ".join(f"--{axis} {n}" for axis, n in sizes.sizes.items() if n > 1)
    run = f"pcg run {flags} or " if sizes.dp == 1 else ""
    return (
        f"{sizes} takes {sizes.world} processes, and this is one of {size}; run it under torchrun "
        f"--nproc-per-node {sizes.world}, or by {run}pcg finetune {flags}"
    )


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """The numbers of ranks that divide a model and its work (docs/parallel.md).

    Attributes:
        dp: data-parallel degree: `dp` times `tp` processes, and each group of `tp` takes some
            sequences of every finetuning step. By default the number of processes over those of
            `tp`, `cp` and `pp`, if any of these is above 1.
        pp: pipeline stages: groups of ranks that have some of the layers each.
        cp: context-parallel degree: ranks that share the tokens of each sequence that is finetuned;
            each has all weights, or a shard of `tp`.
        shard_base: hold 1/dp of the layers' weights on each replica, which gathers every layer
            before it runs and drops it after: for bases that do not fit.
        rank_timeout_s: the longest time that a rank waits for the others, seconds; 300 by default.
    """

    dp: int | None = None
    pp: int = 1
    cp: int = 1
    shard_base: bool = False
    rank_timeout_s: float | None = None

    def sizes(self, tp: int) -> MeshSizes:
        return sizes_of(tp, self.dp, self.cp, self.pp)
