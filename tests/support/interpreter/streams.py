"""Streams of a GPU that is not there, and whether they agree on the memory that they share.

Each stream has a clock, which says of every stream which of its operators are done by the time
that the next one runs; events carry it from one to the other, and what the host waited for is done
for all. An operator that touches bytes which another stream touched is in order if the clock knows
of that; where one of them writes and it does not, that is a race.

Memory goes back to the stream that it was made on, as in torch's allocator: what the stream makes
next may lie there, while another one still runs what used it.
"""

from __future__ import annotations

import threading
import time
import weakref
from bisect import bisect_right, insort
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

DEVICE = torch.device("cuda", 0)
"""The GPU: the first one, as torch's own code takes "cuda" here."""
OTHER = 1
"""The index of a GPU that is not it: the current one of a thread that has not set its device, as
GPU 0 is for CUDA where a model is on another one."""
GRAIN = 4
"""Bytes that are watched as one."""

Clock = dict[int, int]
"""The number of operators that are done, by the number of their stream."""


class DeviceError(RuntimeError):
    """A device would refuse this, or get it wrong."""


def join(clock: Clock, other: Clock) -> None:
    """Have a clock know all that another one knows."""
    for number, done in other.items():
        clock[number] = max(done, clock.get(number, 0))


class Stream:
    """A stream of the GPU, of which `Dealt` makes 32.

    Attributes:
        number: its index.
        clock: the operators that its next one runs after.
        ran: names of its operators.
    """

    def __init__(self) -> None:
        self.device = DEVICE
        self.number = self.cuda_stream = len(ORDER.streams)
        self.clock: Clock = {}
        self.ran: list[str] = []
        ORDER.streams.append(self)

    def wait_event(self, event: Event) -> None:
        join(self.clock, event.clock)
        if event.stream in ORDER.captured:
            ORDER.captured.add(self)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        ORDER.wait("Stream.synchronize", self.clock)


class Dealt:
    """The stand-in of `torch.cuda.Stream`, which gives the next one of 32, in turn."""

    def __new__(cls, device: object = None, priority: int = 0) -> Stream:  # type: ignore[misc]
        ORDER.check_device("a stream", device)
        number = ORDER.dealt % 32
        ORDER.dealt += 1
        if number == len(ORDER.streams) - 1:
            return Stream()
        return ORDER.streams[1 + number]


class Event:
    """The stand-in of `torch.cuda.Event`; `clock` is that of the stream that recorded it."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.clock: Clock = {}
        self.stream: Stream | None = None
        self._at: float | None = None
        self._is_timed = enable_timing

    def record(self, stream: Stream | None = None) -> None:
        if stream is None:
            ORDER.check_device("an event")
        self.stream = stream or ORDER.current
        self.clock = dict(self.stream.clock)
        self._at = time.perf_counter()

    def synchronize(self) -> None:
        ORDER.wait("Event.synchronize", self.clock)

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds of the host, at least a nanosecond."""
        if not (self._is_timed and end._is_timed) or self._at is None or end._at is None:
            raise DeviceError("events without timing, or not recorded")
        return max(1e3 * (end._at - self._at), 1e-6)


class Order:
    """The order of operators.

    Attributes:
        streams: all streams; the first one is torch's default.
        dealt: how often one of the others was asked for.
        host: the operators that the host waited for.
        waits: names of its waits.
        may_wait: whether it may, as `torch.cuda.set_sync_debug_mode` says.
        captured: the streams that a graph is captured on: one, and those that waited for it.
        first_captured: the one of them that it began on.
        is_watched: whether reads and writes are noted.
    """

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.dealt = 0
        self.host: Clock = {}
        self.waits: list[str] = []
        self.may_wait = True
        self.captured: set[Stream] = set()
        self.first_captured: Stream | None = None
        self.is_watched = True
        self._capturing = 0
        self._of_thread = threading.local()
        self._sent: list[tuple[Tensor, Tensor, Clock]] = []
        self._coming: list[tuple[Tensor, Tensor, Clock]] = []

    @property
    def gpu(self) -> int:
        """The index of this thread's current GPU."""
        return getattr(self._of_thread, "gpu", OTHER)

    @gpu.setter
    def gpu(self, index: int) -> None:
        self._of_thread.gpu = index

    def check_device(self, what: str, device: object = None) -> None:
        """Check that what names no GPU, or "cuda" alone, is on `DEVICE`.

        Raises:
            DeviceError: it is on the thread's current GPU, another one.
        """
        given = None if device is None else torch.device(device)  # type: ignore[call-overload]
        index = self.gpu if given is None or given.index is None else given.index
        if index != DEVICE.index:
            name = threading.current_thread().name
            raise DeviceError(f"{what} is on cuda:{index} in thread {name!r}, and not on {DEVICE}")

    @property
    def current(self) -> Stream:
        """The stream that operators of this thread go to."""
        return getattr(self._of_thread, "stream", self.streams[0])

    @current.setter
    def current(self, stream: Stream) -> None:
        self._of_thread.stream = stream

    def tick(self, name: str) -> tuple[Stream, int]:
        """Run an operator: where, and which of its stream's it is.

        Raises:
            DeviceError: another thread captures a graph on the stream.
        """
        stream = self.current
        if stream in self.captured and threading.get_ident() != self._capturing:
            raise DeviceError(
                f"{name} runs on stream {stream.number}, on which a graph is captured"
            )
        join(stream.clock, self.host)
        stream.ran.append(name)
        stream.clock[stream.number] = len(stream.ran)
        return stream, len(stream.ran)

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Have a graph captured on the current stream.

        Raises:
            DeviceError: another stream runs what nothing waits for at the end.
        """
        if self.captured:
            raise DeviceError("two graphs are captured at once")
        first = self.first_captured = self.current
        self.captured, self._capturing = {first}, threading.get_ident()
        try:
            yield
            for stream in self.captured:
                if first.clock.get(stream.number, 0) < stream.clock.get(stream.number, 0):
                    raise DeviceError(
                        f"the capture ends while nothing waits for {stream.ran[-1]} on stream "
                        f"{stream.number}"
                    )
        finally:
            for stream in self.captured:
                join(self.host, stream.clock)  # what is captured does not run
            self.captured, self.first_captured = set(), None

    @property
    def is_on_branch(self) -> bool:
        """True if a graph is captured, and what runs now is on a branch beside its first stream."""
        return self.current in self.captured and self.current is not self.first_captured

    def wait(self, why: str, clock: Clock) -> None:
        """Have the host wait.

        Raises:
            DeviceError: it may not; or memory that it gave the device was changed too soon.
        """
        self.waits.append(why)
        if self.current in self.captured:
            raise DeviceError(f"{why} waits for the device while a graph is captured")
        if not self.may_wait:
            raise DeviceError(f"{why} waits for the device")
        self.check_sent()
        join(self.host, clock)
        self._sent = [
            one for one in self._sent
            if not self._is_done(one[2])
        ]  # fmt: skip
        for to, contents, copied in self._coming:
            if self._is_done(copied):
                to.copy_(contents)
        self._coming = [one for one in self._coming if not self._is_done(one[2])]

    def _is_done(self, clock: Clock) -> bool:
        """True if the host waited for all of it."""
        return all(done <= self.host.get(number, 0) for number, done in clock.items())

    def receive(self, pinned: Tensor) -> None:
        """Have what was copied to the host's memory be there once the host waited for the copy."""
        self._coming.append((pinned, pinned.clone(), dict(self.current.clock)))
        spoil(pinned)

    def synchronize(self, device: object = None) -> None:
        """Have the host wait for everything."""
        everything: Clock = {}
        for stream in self.streams:
            join(everything, stream.clock)
        self.wait("synchronize", everything)

    def send(self, pinned: Tensor) -> None:
        """Have the device read memory of the host in its own time."""
        self._sent.append((pinned, pinned.clone(), dict(self.current.clock)))

    def check_sent(self) -> None:
        """DeviceError: memory of the host changed before the device is known to have read it."""
        for pinned, copy, _ in self._sent:
            if not torch.equal(pinned, copy):
                raise DeviceError("pinned memory was written before the device had read it")


ORDER = Order()
"""The order of the one GPU, for good, as tensors and streams outlive what made them."""
Stream()


def spoil(x: Tensor) -> None:
    """Fill memory that nobody may read yet."""
    if x.is_floating_point():
        x.fill_(float("nan"))
    elif x.dtype != torch.bool:
        x.fill_(torch.iinfo(x.dtype).max)


@dataclass
class Block:
    """Memory that tensors share.

    Attributes:
        start: its address.
        size: in bytes.
        stream: number of the one that it was made on.
        kept_for: numbers of streams that it was recorded for.
        reads: number of the last operator that read each grain, by stream.
        writes: likewise.
    """

    start: int
    size: int
    stream: int
    kept_for: set[int] = field(default_factory=set)
    reads: dict[int, Any] = field(default_factory=dict)
    writes: dict[int, Any] = field(default_factory=dict)

    def touch(self, grains: Any, stream: Stream, now: int, writes: bool) -> None:
        """Have an operator read or write grains.

        Args:
            grains: an index of them.
            stream: the operator's stream, whose last one it is.
            now: its number.
            writes: whether it writes.
        Raises:
            DeviceError: nothing orders it with what another stream did there.
        """
        for kind in (self.writes, self.reads) if writes else (self.writes,):
            for other, times in kind.items():
                latest = times[grains].max(initial=0)  # of no grains, nothing is disordered
                if other != stream.number and latest > stream.clock.get(other, 0):
                    raise DeviceError(
                        f"{stream.ran[-1]} on stream {stream.number} "
                        f"{'writes' if writes else 'reads'} what "
                        f"{ORDER.streams[other].ran[latest - 1]} on stream {other} may still "
                        f"{'write' if kind is self.writes else 'read'}"
                    )
        kind = self.writes if writes else self.reads
        if stream.number not in kind:
            kind[stream.number] = np.zeros(self.size // GRAIN + 1, np.int64)
        kind[stream.number][grains] = now

    def used_by_others(self) -> Clock:
        """The last operators that used it, of streams that its own one may not know of."""
        used: Clock = {}
        for kind in (self.reads, self.writes):
            join(used, {other: int(times.max()) for other, times in kind.items()})
        return {n: at for n, at in used.items() if n != self.stream and n not in self.kept_for}


class Memory:
    """All memory of the device that is in use.

    Attributes:
        total: the bytes that there are; as many as a test has.
        used: the bytes of what is in use.
    """

    def __init__(self) -> None:
        self.total, self.used = 2**34, 0
        self._blocks: dict[int, Block] = {}
        self._starts: list[int] = []
        self._freed: dict[int, list[Clock]] = {}
        self._lock = threading.RLock()

    def add(self, x: Tensor) -> None:
        """Know of a tensor's memory, which the current stream made if it is new.

        Raises:
            DeviceError: it may lie where another stream still works.
        """
        storage = x.untyped_storage()
        start = storage.data_ptr()
        with self._lock:
            if not start or self.at(start) is not None:
                return
            stream = ORDER.current
            if self.used + storage.nbytes() > self.total:
                raise torch.OutOfMemoryError(
                    f"out of memory: {storage.nbytes()} bytes of {self.total - self.used} free"
                )
            self.used += storage.nbytes()
            self._blocks[start] = Block(start, storage.nbytes(), stream.number)
            insort(self._starts, start)
            # A graph's own memory is no other's.
            is_captured = stream in ORDER.captured
            weakref.finalize(storage, self._remove, start, is_captured)
            freed = [] if is_captured else self._freed.pop(stream.number, [])
        join(stream.clock, ORDER.host)
        for used in freed:
            for other, at in used.items():
                if at > stream.clock.get(other, 0):
                    raise DeviceError(
                        f"stream {stream.number} may write to memory that was freed while "
                        f"{ORDER.streams[other].ran[at - 1]} on stream {other} may still use it"
                    )

    def _remove(self, start: int, is_captured: bool) -> None:
        with self._lock:
            block = self._blocks.pop(start)
            self.used -= block.size
            del self._starts[bisect_right(self._starts, start) - 1]
            if not is_captured:
                self._freed.setdefault(block.stream, []).append(block.used_by_others())

    def of(self, x: Tensor) -> Block:
        """The block that a tensor lies in: its storage, or the memory of a pool of graphs."""
        block = self.at(x.untyped_storage().data_ptr())
        assert block is not None
        return block

    def at(self, address: int) -> Block | None:
        """The block that a byte lies in; None in none."""
        with self._lock:
            place = bisect_right(self._starts, address) - 1
            block = self._blocks[self._starts[place]] if place >= 0 else None
        return block if block and address < block.start + block.size else None
