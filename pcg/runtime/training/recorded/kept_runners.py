"""Kept runners: recorded jobs that have ended, or have yet to come, for others of their shape.

A graph reads an adapter where it lies, so a job that takes recorded windows over has its adapter
there: its weights are copied into that of the runner. Both have the same recipe, and tensors of the
same sizes. Runners keep what their windows save for backward. Those of a warm-up last; of others
there is one, of the job that ended last, until a job comes that cannot use it, or no job is left.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from threading import Lock
from typing import Generic, Protocol, TypeVar
from weakref import WeakSet

import torch

from pcg.ir.program.program import Training
from pcg.peft.adapter import Adapter


class Recorded(Protocol):
    """A runner with recorded windows, of one adapter."""

    adapter: Adapter
    training: Training

    @property
    def is_recorded(self) -> bool:
        """True if it has recorded windows, and trains by one program alone."""


Runner = TypeVar("Runner", bound=Recorded)


class KeptRunners(Generic[Runner]):
    """Runners that no job has; any thread may ask for one."""

    def __init__(self) -> None:
        self._jobs = 0
        self._kept: list[Runner] = []
        self._lasting: WeakSet[Runner] = WeakSet()
        self._lock = Lock()

    def begin_job(self) -> Callable[[], None]:
        """Have a job that is prepared or runs; returns what ends it.

        With the last one the memory of all runners goes that do not last.
        """
        with self._lock:
            self._jobs += 1
        return self._end_job

    def _end_job(self) -> None:
        with self._lock:
            self._jobs -= 1
            if not self._jobs:
                self._drop_others()

    def give(self, runner: Runner, lasts: bool = False) -> None:
        """Keep a runner, if it has recorded windows; for good if it lasts."""
        if not runner.is_recorded:
            return
        with self._lock:
            if lasts:
                self._lasting.add(runner)
            if runner not in self._lasting:
                self._drop_others()
            self._kept.append(runner)

    def take(self, training: Training, adapter: Adapter) -> Runner | None:
        """Return a runner that trains an adapter by its program; None if none can.

        The runner's adapter has other tensors than the one that is given, with its values.
        """
        with self._lock:
            runner = next((r for r in self._kept if _is_alike(r, training, adapter)), None)
            if runner is None:
                self._drop_others()
                return None
            self._kept.remove(runner)
        own = runner.adapter
        with torch.no_grad():
            for to, values in zip(_all_of(own), _all_of(adapter), strict=True):
                to.copy_(values)
        runner.adapter = dataclasses.replace(
            own,
            name=adapter.name,
            recipe=adapter.recipe,
            base_model_name=adapter.base_model_name,
            extra=adapter.extra,
        )
        return runner

    def _drop_others(self) -> None:
        """Drop the runners that do not last."""
        self._kept = [one for one in self._kept if one in self._lasting]


def _all_of(adapter: Adapter) -> list[torch.Tensor]:
    return [*adapter.tensors, *(adapter.shared[name] for name in sorted(adapter.shared))]


def _is_alike(runner: Recorded, training: Training, adapter: Adapter) -> bool:
    own = runner.adapter
    return (
        runner.training is training
        and own.recipe == adapter.recipe
        and {path: weights.bypass for path, weights in own.weights.items()}
        == {path: weights.bypass for path, weights in adapter.weights.items()}
        and own.biases.keys() == adapter.biases.keys()
        and own.shared.keys() == adapter.shared.keys()
        and [(x.shape, x.dtype) for x in _all_of(own)]
        == [(x.shape, x.dtype) for x in _all_of(adapter)]
    )
