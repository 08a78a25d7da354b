"""Ranks as threads of one process: collectives without a process group."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from pcg.ranks.group import COLLECTIVES, SINGLE_RANK, Ranks, RowsToAll
from pcg.ranks.mesh import AXES, MeshSizes, RankMesh, members


class ThreadRanks:
    """One rank of a group of threads, `pcg.ranks.group.Ranks`.

    Attributes:
        device: of the tensors that they exchange.
        moved_bytes: what this rank has sent by ring algorithms, per kind of collective.
        messages: in how many messages.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        barrier: threading.Barrier,
        slots: list[Any],
        sent: defaultdict[tuple[int, int], queue.Queue[Tensor]],
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = torch.device("cpu")
        self._barrier = barrier
        self._slots = slots
        self._sent = sent
        self.moved_bytes = dict.fromkeys(COLLECTIVES, 0)
        self.messages = dict.fromkeys(COLLECTIVES, 0)

    def _exchange(self, x: Tensor) -> list[Tensor]:
        self._slots[self.rank] = x.clone()
        self._barrier.wait()
        found = list(self._slots)
        self._barrier.wait()
        return found

    def all_reduce(self, x: Tensor) -> Tensor:
        size_bytes = x.numel() * x.element_size()
        self.moved_bytes["all_reduce"] += 2 * size_bytes * (self.size - 1) // self.size
        self.messages["all_reduce"] += 1
        return torch.stack(self._exchange(x)).sum(0)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        self.moved_bytes["all_gather"] += x.numel() * x.element_size() * (self.size - 1)
        self.messages["all_gather"] += 1
        return self._exchange(x)

    def reduce_scatter(self, parts: list[Tensor]) -> Tensor:
        own = parts[self.rank]
        self.moved_bytes["reduce_scatter"] += own.numel() * own.element_size() * (self.size - 1)
        self.messages["reduce_scatter"] += 1
        return torch.stack([x[self.rank] for x in self._exchange(torch.stack(parts))]).sum(0)

    def all_to_all(self, x: RowsToAll) -> Tensor:
        rows, sent, _ = x
        others = len(rows) - sent[self.rank]
        self.moved_bytes["all_to_all"] += others * rows.shape[1:].numel() * rows.element_size()
        self.messages["all_to_all"] += 1
        self._slots[self.rank] = rows.clone().split([*sent])
        self._barrier.wait()
        found = torch.cat([parts[self.rank] for parts in self._slots])
        self._barrier.wait()
        return found

    def gather(self, x: Tensor) -> list[Tensor]:
        self.moved_bytes["gather"] += x.nbytes if self.rank else 0
        self.messages["gather"] += 1
        found = self._exchange(x)
        return [] if self.rank else found

    def broadcast(self, x: Tensor) -> Tensor:
        self.moved_bytes["broadcast"] += 0 if self.rank else x.nbytes * (self.size - 1)
        self.messages["broadcast"] += 1
        return self._exchange(x)[0]

    def begin_send(self, x: Tensor, to: int) -> Callable[[], Any]:
        self.moved_bytes["send"] += x.nbytes
        self.messages["send"] += 1
        self._sent[self.rank, to].put(x.clone())
        return lambda: None

    def receive(self, out: Tensor, source: int) -> Tensor:
        while not self._barrier.broken:
            with contextlib.suppress(queue.Empty):
                return out.copy_(self._sent[source, self.rank].get(timeout=0.1))
        raise threading.BrokenBarrierError

    def exchange(self, x: Tensor, out: Tensor, other: int) -> Tensor:
        self.begin_send(x, other)
        return self.receive(out, other)

    def tell(self, word: bytes) -> list[bytes]:
        own = torch.frombuffer(bytearray(word), dtype=torch.uint8)
        return [bytes(each.numpy()) for each in self._exchange(own)]

    def begin(self, collective: str, x: Any) -> Callable[[], Any]:
        """Nothing is exchanged until it is waited for, so what changes meanwhile shows."""
        return partial(getattr(self, collective), x)

    def begin_gather_into(self, whole: Tensor, own: Tensor) -> Callable[[], Any]:
        return lambda: whole.copy_(torch.cat(self.all_gather(own)))


class Wire:
    """The messages of one rank, as a GPU has them: one after the other, in all of its groups.

    A message is under way until the other rank has come to it, too.
    """

    def __init__(self) -> None:
        self._queue = ThreadPoolExecutor(1, "wire")

    def begin(self, act: Callable[[], Any]) -> Callable[[], Any]:
        return self._queue.submit(act).result


class WiredRanks(ThreadRanks):
    """One rank of a group whose messages and collectives each take the rank's one wire.

    What waits for longer than `PATIENCE_S` waits for ever: ranks then wait for each other.
    """

    PATIENCE_S = 20.0

    def __init__(self, rank: int, size: int, room: Any, wire: Wire) -> None:
        super().__init__(rank, size, *room)
        self._wire = wire

    def _exchange(self, x: Tensor) -> list[Tensor]:
        own = x.clone()
        return cast("list[Tensor]", self._wire.begin(partial(super()._exchange, own))())

    def begin_send(self, x: Tensor, to: int) -> Callable[[], Any]:
        return self._begin(x, None, to)

    def receive(self, out: Tensor, source: int) -> Tensor:
        self._begin(None, out, source)()
        return out

    def exchange(self, x: Tensor, out: Tensor, other: int) -> Tensor:
        self._begin(x, out, other)()
        return out

    def _begin(self, x: Tensor | None, out: Tensor | None, other: int) -> Callable[[], Any]:
        if x is not None:
            self.moved_bytes["send"] += x.nbytes
            self.messages["send"] += 1

        def act() -> None:
            sent, came = self._sent[self.rank, other], self._sent[other, self.rank]
            try:
                if x is not None:
                    sent.put(x.clone(), timeout=self.PATIENCE_S)
                if out is not None:
                    out.copy_(came.get(timeout=self.PATIENCE_S))
                    came.task_done()
                if x is not None:
                    self._until_taken(sent)
            except (queue.Empty, queue.Full):
                self._barrier.abort()
                raise TimeoutError(f"rank {self.rank} waits for rank {other} for ever") from None

        return self._wire.begin(act)

    def _until_taken(self, sent: queue.Queue[Tensor]) -> None:
        with sent.all_tasks_done:
            if not sent.all_tasks_done.wait_for(lambda: not sent.unfinished_tasks, self.PATIENCE_S):
                raise queue.Full


def tp_mesh(ranks: Any) -> RankMesh:
    """The mesh of a tensor-parallel group alone."""
    groups = dict.fromkeys(("world", "tp", "model", "replica"), ranks)
    return RankMesh(MeshSizes(tp=ranks.size), **groups)


def run_ranks(size: int, run: Callable[[ThreadRanks], Any]) -> list[Any]:
    """What `run` gives on each rank; an error on one ends all."""
    return run_mesh(MeshSizes(tp=size), lambda mesh: run(cast("ThreadRanks", mesh.world)))


def run_mesh(sizes: MeshSizes, run: Callable[[RankMesh], Any], *, wired: bool = False) -> list[Any]:
    """What `run` gives on each rank of a mesh; an error on one ends all.

    With `wired`, the messages of a rank run one after the other, as on a GPU.
    """
    wires = [Wire() for _ in range(sizes.world)]
    groups: dict[tuple[int, ...], tuple[threading.Barrier, list[Any], Any]] = {}
    for axes in (*((axis,) for axis in AXES), ("dp", "cp"), ("pp", "tp"), ("pp", "cp", "tp"), AXES):
        for numbers in members(sizes, axes):
            sent: Any = defaultdict(queue.Queue)
            room = (threading.Barrier(len(numbers)), [None] * len(numbers), sent)
            groups.setdefault(tuple(numbers), room)

    def group(number: int, *axes: str) -> Ranks:
        numbers = next(one for one in members(sizes, axes) if number in one)
        if len(numbers) == 1:
            return SINGLE_RANK
        room = groups[tuple(numbers)]
        rank, size = numbers.index(number), len(numbers)
        if wired:
            return cast("Ranks", WiredRanks(rank, size, room, wires[number]))
        return cast("Ranks", ThreadRanks(rank, size, *room))

    def one(number: int) -> Any:
        own = {axis: group(number, axis) for axis in AXES}
        own |= {"world": group(number, *AXES), "data": group(number, "dp", "cp")}
        own["model"] = group(number, "pp", "tp")
        own["replica"] = group(number, "pp", "cp", "tp")
        try:
            return run(RankMesh(sizes, **own))
        except BaseException:
            for barrier, *_ in groups.values():
                barrier.abort()
            raise

    with ThreadPoolExecutor(sizes.world) as pool:
        futures = [pool.submit(one, number) for number in range(sizes.world)]
        errors = [e for future in futures if (e := future.exception()) is not None]
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [future.result() for future in futures]
