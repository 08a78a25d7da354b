"""Ranks as threads of one process: collectives without a process group."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pcg.parallel.ranks.group import COLLECTIVES


class ThreadRanks:
    """One rank of a group of threads, `pcg.parallel.ranks.group.Ranks`.

    Attributes:
        device: of the tensors that they exchange.
        moved_bytes: what this rank has sent by ring algorithms, per kind of collective.
        messages: in how many messages.
    """

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, slots: list[Any]) -> None:
        self.rank = rank
        self.size = size
        self.device = torch.device("cpu")
        self._barrier = barrier
        self._slots = slots
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

    def gather(self, x: Tensor) -> list[Tensor]:
        self.moved_bytes["gather"] += x.nbytes if self.rank else 0
        self.messages["gather"] += 1
        found = self._exchange(x)
        return [] if self.rank else found

    def broadcast(self, x: Tensor) -> Tensor:
        self.moved_bytes["broadcast"] += 0 if self.rank else x.nbytes * (self.size - 1)
        self.messages["broadcast"] += 1
        return self._exchange(x)[0]

    def tell(self, word: bytes) -> list[bytes]:
        own = torch.frombuffer(bytearray(word), dtype=torch.uint8)
        return [bytes(each.numpy()) for each in self._exchange(own)]

    def begin(self, collective: str, x: Any) -> Callable[[], Any]:
        """Nothing is exchanged until it is waited for, so what changes meanwhile shows."""
        return partial(getattr(self, collective), x)


def run_ranks(size: int, run: Callable[[ThreadRanks], Any]) -> list[Any]:
    """What `run` gives on each rank; an error on one ends all."""
    barrier = threading.Barrier(size)
    slots: list[Any] = [None] * size

    def one(rank: int) -> Any:
        try:
            return run(ThreadRanks(rank, size, barrier, slots))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(one, rank) for rank in range(size)]
        errors = [e for future in futures if (e := future.exception()) is not None]
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [future.result() for future in futures]
