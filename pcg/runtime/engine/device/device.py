"""The interface between the engine and the device that runs its steps, real or simulated.

A GPU works in parallel to the host, so that the forward of a step may start before the tokens of
the previous step are read (`running.py`). Drawing tokens is separate from the forward, because
penalties, guides and stop conditions depend on the previous tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as List
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pcg.kernels.devices import stream_for
from pcg.runtime.adapters.cache import ServedAdapter
from pcg.runtime.requests.request import Request
from pcg.runtime.requests.sequence import Sequence
from pcg.runtime.requests.step import Results
from pcg.runtime.training.work_units import Forward, Part


class Launched(Protocol):
    """A step with a launched forward."""

    def draw(self) -> None:
        """Draw the tokens of the sequences that still run, after the previous tokens are read."""

    def read(self) -> Results:
        """Wait for the end, and return the results."""

    @property
    def is_replayed(self) -> bool:
        """True if recorded steps ran the whole forward."""

    @property
    def device_s(self) -> float | None:
        """The step's time on the device's own clock, after `read`; None without such a clock."""


@dataclass(frozen=True)
class Finished:
    """A launched step of a synchronous device."""

    results: Callable[[], Results]
    is_replayed: bool = False
    device_s: float | None = None

    def draw(self) -> None:
        """Do nothing: the tokens are already drawn."""

    def read(self) -> Results:
        """Return the results."""
        return self.results()


class SideStream:
    """A second stream of a GPU, for parts of jobs during a step's forward (FlexLLM v2 §6.1).

    A stream may reuse memory of the other stream only after `begin` or `rejoin`, which synchronize
    the streams, or after `join`, which waits on the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = stream_for("side", device)
        self._before: torch.cuda.Event | None = None
        self._timed: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def begin(self) -> None:
        """Mark the start of a forward; parts on this stream do not depend on it."""
        main = torch.cuda.current_stream(self._stream.device)
        self._before = main.record_event()

    def rejoin(self) -> None:
        """Make the main stream wait for the parts."""
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    @contextmanager
    def beside(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            if self._before is not None:
                self._stream.wait_event(self._before)
            yield

    @contextmanager
    def timed(self) -> Iterator[None]:
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        started.record(self._stream)
        yield
        ended.record(self._stream)
        self._timed.append((started, ended))

    def join(self) -> list[float]:
        """Wait for the parts timed since the last call; return the seconds of each.

        The call does not wait for later work on the stream, such as copies of a published version.
        """
        timed, self._timed = self._timed, []
        if timed:
            timed[-1][1].synchronize()
        return [started.elapsed_time(ended) / 1e3 for started, ended in timed]


class Device(Protocol):
    """Runs a program, on the real device or in simulated time.

    Attributes:
        cache: keys and values for jobs.
        side: the second stream, which runs parts of jobs; None if parts run between forwards.
        fails_alike: True if every rank sees the error of a failed step; False over several ranks.
        is_ahead: True if a step may be launched before the tokens of the previous step are read.
        layers: the number of the model's layers.
        late: number of kernels that were compiled and of steps that were recorded while requests
            waited, by kind; 0 after a complete warm-up.
    """

    cache: Any
    side: SideStream | None
    fails_alike: bool
    is_ahead: bool

    @property
    def layers(self) -> int: ...

    @property
    def late(self) -> Mapping[str, int]: ...

    @property
    def copies_bytes(self) -> int:
        """Bytes of adapters' copies outside the pool; on any thread."""

    def open(self, request: Request, number: int) -> Sequence:
        """Return the state of a new request, with other continuations as its followers.

        GenerationError: the model cannot run the request.
        """

    def copy_page(self, page: int, to: int) -> None:
        """Copy keys and values of `page` to another page."""

    def copy_states(self, slot: int, to: int) -> None:
        """Copy the recurrent states of a sequence to another slot."""

    def prefetch(self, adapters: List[ServedAdapter]) -> None:
        """Start copying adapters that have pages, in the background and in the given order."""

    def is_copying(self, adapter: ServedAdapter) -> bool:
        """Return True during an adapter's copy, for which a step with the adapter would wait."""

    def evict(self, adapter: ServedAdapter) -> None:
        """Release an adapter's pages."""

    def reset(self) -> None:
        """Drop all adapters in memory, which a failed call may have left inconsistent."""

    def start(
        self, chunks: List[tuple[Sequence, int]], windows: List[tuple[Forward, int]]
    ) -> Launched:
        """Run sequences' next tokens and windows of jobs together.

        Args:
            chunks: sequences, and the number of their pending tokens to run.
            windows: units of jobs, and the number of their tokens to run.
        Returns:
            The launched step; its tokens are drawn and read afterwards.
        """

    def run_parts(self, parts: List[Part]) -> None:
        """Run parts of the same stage of different jobs together."""

    def check_alive(self) -> None:
        """Run a token of the base; raise an error if the device is lost."""
