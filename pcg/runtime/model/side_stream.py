"""A side stream: backward units run on it beside a step's forward (FlexLLM v2 §6.1)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """A second stream of one GPU; see `pcg.runtime.engine.device.Side`.

    Memory that one stream used may be used by the other only after `join`, for which the host
    waits.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._before: torch.cuda.Event | None = None
        self._timed: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def begin(self) -> None:
        main = torch.cuda.current_stream(self._stream.device)
        self._before = main.record_event()

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
        self._stream.synchronize()
        timed, self._timed = self._timed, []
        return [started.elapsed_time(ended) / 1e3 for started, ended in timed]
