"""The ranks of a tensor-parallel group: processes that torchrun or `pcg run --tp` has started.

Every rank runs the same calls in the same order. Bytes that a rank sends, by ring algorithms over n
ranks: 2 (n - 1) / n of a tensor for an all-reduce, n - 1 times its part for an all-gather or a
reduce-scatter. A gather takes each rank's part to the first, which sends nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.rendezvous import rendezvous

from pcg.errors import ParallelError, RankLostError

TIMEOUT_S = 300
"""The longest time that a rank waits for the others, which may load their weights more slowly, if
no other time is asked for."""
MOST_TIMEOUT_S = 10**7
ROLL_CALL_S = 2.0
"""The time that a rank waits to hear which others are still there, once one is gone."""
AXIS = "tp"
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "gather", "broadcast")
"""The kinds of messages that ranks exchange."""

PendingCollective: TypeAlias = Callable[[], Any]
"""A collective that has begun: called once, it waits for it and returns its result."""


class Ranks:
    """A tensor-parallel group, as one of its ranks sees it; here the group of one rank.

    Of several ranks, each method raises a RankLostError if another one is gone.

    Attributes:
        rank: the number of this rank.
        size: the number of ranks.
        device: the device of the tensors that they exchange.
        moved_bytes: bytes that this rank has sent, by kind of collective.
        messages: number of messages that it has sent, by kind of collective.
    """

    rank = 0
    size = 1
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.moved_bytes = dict.fromkeys(COLLECTIVES, 0)
        self.messages = dict(self.moved_bytes)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of the ranks' tensors, in one of the same shape."""
        return x

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """The ranks' tensors, in their order."""
        return [x]

    def reduce_scatter(self, parts: list[Tensor]) -> Tensor:
        """The sum of the ranks' tensors at this rank's place: `parts` has one for each rank."""
        return parts[0]

    def gather(self, x: Tensor) -> list[Tensor]:
        """The ranks' tensors, in their order, on the first rank; none on the others."""
        return [x]

    def broadcast(self, x: Tensor) -> Tensor:
        """The first rank's tensor; the others give one of its shape and dtype to read it into."""
        return x

    def tell(self, word: bytes) -> list[bytes]:
        """The ranks' words, of one length, in their order; they do not count as sent."""
        return [word]

    def begin(self, collective: str, x: Any) -> PendingCollective:
        """Begin one but a broadcast, by its name; it goes on while this rank does other work.

        Its argument has to stay as it is until it is waited for; on a GPU the stream waits, not the
        host.
        """
        return partial(getattr(self, collective), x)


SINGLE_RANK = Ranks()


class ProcessRanks(Ranks):
    """A group of processes, over a process group of torch: NCCL's for a GPU, else gloo's.

    In the store, where there is one, ranks leave word that they are there.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, store: Any = None) -> None:
        super().__init__()
        self.rank = group.rank()
        self.size = group.size()
        self.device = device
        self._group = group
        self._store = store

    def all_reduce(self, x: Tensor) -> Tensor:
        return cast("Tensor", self._begin("all_reduce", x, False)())

    def all_gather(self, x: Tensor) -> list[Tensor]:
        return cast("list[Tensor]", self._begin("all_gather", x, False)())

    def reduce_scatter(self, parts: list[Tensor]) -> Tensor:
        return cast("Tensor", self._begin("reduce_scatter", parts, False)())

    def gather(self, x: Tensor) -> list[Tensor]:
        return cast("list[Tensor]", self._begin("gather", x, False)())

    def broadcast(self, x: Tensor) -> Tensor:
        self.moved_bytes["broadcast"] += 0 if self.rank else x.nbytes * (self.size - 1)
        self.messages["broadcast"] += 1
        with self._naming_lost("a broadcast"):
            dist.broadcast(x, group_src=0, group=self._group)
        return x

    def tell(self, word: bytes) -> list[bytes]:
        own = torch.frombuffer(bytearray(word), dtype=torch.uint8).to(self.device)
        words = [torch.empty_like(own) for _ in range(self.size)]
        with self._naming_lost("a comparison"):
            dist.all_gather(words, own, group=self._group)
        return [bytes(each.cpu().numpy()) for each in words]

    def begin(self, collective: str, x: Any) -> PendingCollective:
        return self._begin(collective, x, True)

    def _begin(self, collective: str, x: Any, meanwhile: bool) -> PendingCollective:
        result: Any
        if collective == "all_reduce":
            result = x.clone(memory_format=torch.contiguous_format)
            run, what = partial(dist.all_reduce, result), "an all-reduce"
            moved_bytes = 2 * x.nbytes * (self.size - 1) // self.size
        elif collective == "all_gather":
            own = x.contiguous()
            result = [torch.empty_like(own) for _ in range(self.size)]
            run, what = partial(dist.all_gather, result, own), "an all-gather"
            moved_bytes = own.nbytes * (self.size - 1)
        elif collective == "gather":
            own = x.contiguous()
            result = [] if self.rank else [torch.empty_like(own) for _ in range(self.size)]
            run, what = partial(dist.gather, own, result or None, group_dst=0), "a gather"
            moved_bytes = own.nbytes if self.rank else 0
        else:
            result = torch.empty_like(x[self.rank])
            run, what = partial(dist.reduce_scatter, result, x), "a reduce-scatter"
            moved_bytes = result.nbytes * (self.size - 1)
        self.moved_bytes[collective] += moved_bytes
        self.messages[collective] += 1
        with self._naming_lost(what):
            work = run(group=self._group, async_op=meanwhile)
        return partial(self._ended, run, work, result, what)

    def _ended(self, run: object, work: dist.Work | None, result: Any, what: str) -> Any:
        if work is not None:
            with self._naming_lost(what):
                work.wait()
        return result

    @contextlib.contextmanager
    def _naming_lost(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            raise RankLostError(
                f"{self._lost()} of {self.size} ended, or waits for something else, while rank "
                f"{self.rank} was in {what} with it; its own message says why. All ranks have to "
                f"start again ({reason})"
            ) from error

    def _lost(self) -> str:
        """Names of the ranks that do not answer, or of all others where that cannot be told."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        missing, is_told = others, False
        # The store is gone where the rank that kept it is; a user's own group gives none.
        with contextlib.suppress(RuntimeError):
            if self._store is not None:
                word = "pcg/still-there/{}".format
                self._store.set(word(self.rank), "here")
                end = time.monotonic() + ROLL_CALL_S
                while missing and time.monotonic() < end:
                    missing = [rank for rank in missing if not self._store.check([word(rank)])]
                    time.sleep(0.05)
                is_told = bool(missing)
        names = missing or others
        listed = ", ".join(map(str, names))
        if len(names) == 1:
            return f"rank {listed}"
        return f"ranks {listed}" if is_told else f"one of the ranks {listed}"


def join_group(degree: int, device: torch.device, timeout_s: float | None = None) -> Ranks:
    """Join the group of so many ranks, of which this process, with its device, is one.

    Args:
        timeout_s: the longest time that a rank waits for the others; `TIMEOUT_S` by default.
    Raises:
        ParallelError: this process is not one of so many, or another one has its GPU; or the time
            is none.
    """
    _check_timeout(degree, timeout_s)
    if degree == 1:
        return SINGLE_RANK
    timeout = timedelta(seconds=TIMEOUT_S if timeout_s is None else timeout_s)
    store: Any = None
    if not dist.is_initialized():
        if started_ranks() == 1:
            check_started(degree)
        store, rank, size = next(rendezvous("env://", timeout=timeout))
        _check_alike(store, rank, size, f"tp={degree} on {device.type}")
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
    if dist.get_world_size() != degree:
        raise ParallelError(_not_so_many(degree, dist.get_world_size()))
    if store is None and timeout_s is not None:  # the group that is there may have another time
        group = dist.new_group(timeout=timeout)
    else:
        group = init_device_mesh(device.type, (degree,), mesh_dim_names=(AXIS,)).get_group(AXIS)
    return ProcessRanks(group, device, store)


def _check_timeout(degree: int, timeout_s: float | None) -> None:
    if timeout_s is None:
        return
    if degree == 1:
        raise ParallelError(
            f"rank_timeout_s={timeout_s!r} has no effect with tp=1, which waits for no other rank; "
            "give tp=2 or more (--tp 2), or leave it out"
        )
    is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if not is_number or not 0 < timeout_s <= MOST_TIMEOUT_S:
        raise ParallelError(
            f"rank_timeout_s={timeout_s!r}; use seconds above 0, up to {MOST_TIMEOUT_S}"
        )


def check_started(degree: int) -> None:
    """Raise a ParallelError in a process that is not one of so many ranks."""
    size = dist.get_world_size() if dist.is_initialized() else started_ranks()
    if size != degree:
        raise ParallelError(_not_so_many(degree, size))


def _check_alike(store: Any, rank: int, size: int, own: str) -> None:
    """Refuse a group whose ranks want another size or kind of device, on every rank.

    Raises:
        ParallelError: says what each of them wants.
    """
    store.set(f"pcg/asked/{rank}", own)
    asked = [store.get(f"pcg/asked/{other}").decode() for other in range(size)]
    if len(set(asked)) > 1:
        store.set(f"pcg/heard/{rank}", "all")
        with contextlib.suppress(RuntimeError):  # the rank that keeps the store ends last
            heard = [f"pcg/heard/{other}" for other in range(size)]
            store.wait(heard, timedelta(seconds=ROLL_CALL_S))
        each = ", ".join(f"rank {other} {one}" for other, one in enumerate(asked))
        raise ParallelError(
            f"{size} ranks have to ask for the same group, and ask for: {each}; give all of them "
            f"tp={size} and the same kind of device"
        )


def check_own_gpu(store: Any, rank: int, size: int, uuid: str) -> None:
    """Refuse to run where two ranks have one GPU, as `device="cuda:0"` on all of them would.

    Args:
        store: a store that all ranks share.
        rank: the number of this rank.
        size: the number of ranks.
        uuid: the UUID of this rank's GPU.
    Raises:
        ParallelError: on every rank; names those that share one.
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
    """The number of processes that torchrun has started, with this one; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", 1)) if "RANK" in os.environ else 1


def own_device(device: torch.device) -> torch.device:
    """The rank's own device: torchrun's LOCAL_RANK numbers the GPUs.

    A GPU that is named by its number, as "cuda:1", is taken as it is; `join_group` refuses one that
    two ranks have named.

    Raises:
        ParallelError: the machine has fewer GPUs than ranks.
    """
    if device.type != "cuda" or device.index is not None:
        return device
    local, there = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if local >= there:
        raise ParallelError(
            f"rank {local} of this machine has no GPU: there are {there}; start as many ranks as "
            'there are, or use device="cpu"'
        )
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    return device


def _not_so_many(degree: int, size: int) -> str:
    return (
        f"tp={degree} takes {degree} processes, and this is one of {size}; run it under torchrun "
        f"--nproc-per-node {degree}, or by pcg run --tp {degree} or pcg finetune --tp {degree}"
    )


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def run_on_first(ranks: Ranks, act: Callable[[], object]) -> None:
    """Do something on the first rank, such as writing a file, while the others wait for it.

    Raises:
        BaseException: what `act` raised there; the other ranks raise a ParallelError.
    """
    error: BaseException | None = None
    if ranks.rank == 0:
        try:
            act()
        except BaseException as found:  # whatever it is, the others have to hear of it
            error = found
    failed = ranks.all_reduce(torch.tensor(float(error is not None), device=ranks.device))
    if error is not None:
        raise error
    if float(failed):
        raise ParallelError("rank 0 could not do its work for all ranks; its own message says why")


def broadcast_from_first(ranks: Ranks, values: Tensor) -> Tensor:
    """The first rank's values on every rank, for decisions that all have to take alike."""
    if ranks.size == 1:
        return values
    return ranks.broadcast(values.to(ranks.device, copy=True)).to(values.device)
