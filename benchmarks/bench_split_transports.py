"""Measure round trips between a client and a base: shared memory, TCP, and torch.distributed.

    python benchmarks/bench_split_transports.py [--rounds 5] [--trips 30]

A tensor goes to another process of this machine and comes back, as a piece's input and output do:
by pcg's transports, and by gloo's `dist.send` and `dist.recv`, each behind a header of 16 numbers,
which a base needs to know what comes. Reported are medians over the rounds of gloo's time divided
by each transport's in that round, and of the times, µs.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measure import write

SIZES = (2**12, 2**16, 2**20, 2**22, 2**24)
"""Bytes of a tensor: from a row of a decode step to 512 rows of 8,192 numbers."""
_PCG = ("shared-memory", "tcp")


def join(rank: int, place: str) -> None:
    """Be one of two processes of gloo's."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=2)


def echo(place: str, address: Any, trips: int, rounds: int) -> None:
    """Send back whatever comes: by pcg's endpoint, and by gloo."""
    from pcg.split.messages import Message
    from pcg.split.zeromq import ZeroMqEndpoint

    join(1, place)
    endpoint = ZeroMqEndpoint("127.0.0.1", 0, 2**28)
    address.put(endpoint.where)
    for _ in range(rounds + 1):
        left = len(_PCG)
        while left:
            for client, message in endpoint.receive(1.0):
                assert isinstance(message, Message)
                if message.op == "share":
                    shared = endpoint.share(client, message.number("bytes", 2**30))
                    endpoint.send(client, Message("reply", message.seq, shared.fields))
                    continue
                left -= message.op == "bye"
                endpoint.send(client, Message("reply", message.seq, {}, message.tensors))
        for size in SIZES:
            head, tensor = torch.zeros(16, dtype=torch.int64), torch.zeros(size // 4)
            for _ in range(trips):
                dist.recv(head, 0)
                dist.recv(tensor, 0)
                dist.send(head, 0)
                dist.send(tensor, 0)
    endpoint.close()
    dist.destroy_process_group()


def timed(trips: int, act: Callable[[], object]) -> float:
    """Return the median time of a call, µs."""
    found = []
    for _ in range(trips):
        started = time.perf_counter()
        act()
        found.append(time.perf_counter() - started)
    return 1e6 * statistics.median(found)


def by_pcg(kind: str, where: str, trips: int) -> dict[int, float]:
    """Return the time of a round trip by one of pcg's transports, by size."""
    from pcg.split.messages import Message
    from pcg.split.zeromq import transport_to

    transport, found = transport_to(where, kind), {}
    transport.open()
    transport.welcomed(Message("share", 1))
    numbers = iter(range(2, 10**9))
    for size in SIZES:
        tensor = torch.zeros(size // 4)

        def trip(tensor: torch.Tensor = tensor) -> None:
            transport.exchange(Message("run", next(numbers), {}, (tensor,)), 60.0)

        found[size] = timed(trips, trip)
    transport.exchange(Message("bye", next(numbers)), 60.0)
    transport.close()
    return found


def by_gloo(trips: int) -> dict[int, float]:
    """Return the time of a round trip by gloo, by size."""
    found = {}
    for size in SIZES:
        head, tensor = torch.zeros(16, dtype=torch.int64), torch.zeros(size // 4)

        def trip(head: torch.Tensor = head, tensor: torch.Tensor = tensor) -> None:
            dist.send(head, 1)
            dist.send(tensor, 1)
            dist.recv(head, 1)
            dist.recv(tensor, 1)

        found[size] = timed(trips, trip)
    return found


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trips", type=int, default=30)
    given = parser.parse_args()
    context = get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        place, address = str(Path(folder) / "group"), context.Queue()
        other = context.Process(target=echo, args=(place, address, given.trips, given.rounds))
        other.start()
        join(0, place)
        where = address.get(timeout=120)
        acts = {kind: partial(by_pcg, kind, where, given.trips) for kind in _PCG}
        rounds = []
        for _ in range(given.rounds + 1):
            rounds.append({name: act() for name, act in acts.items()})
            rounds[-1]["gloo"] = by_gloo(given.trips)
        other.join(60)
        dist.destroy_process_group()
    rounds = rounds[1:]
    sizes = {}
    for size in SIZES:
        us = {n: round(statistics.median(one[n][size] for one in rounds)) for n in rounds[0]}
        ratios = {
            f"gloo / {name}": round(
                statistics.median(one["gloo"][size] / one[name][size] for one in rounds), 2
            )
            for name in _PCG
        }
        sizes[str(size)] = {"us": us, **ratios}
    write("split_transports", {"bytes": sizes})


if __name__ == "__main__":
    main()
