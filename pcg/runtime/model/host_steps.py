"""Recorded decode steps on a CPU; see `pcg.kernels.torch.host_recorder`.

A step of a few sequences with a new token each runs the kernels of the previous step, at other rows
of the cache. Its recording holds for the number of sequences and for adapters as long as they stay
bound; the tokens and rows are copied into the recording's memory.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import NoReturn, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from pcg.kernels.batch import DecodeGroup, DecodeRows
from pcg.kernels.torch.host_kernels import is_native
from pcg.kernels.torch.host_recorder import HostRecording, TooLargeError
from pcg.kernels.torch.products import is_remote
from pcg.native_library import NotRecordedError
from pcg.runtime.adapters.padded_tables import BoundAdapters
from pcg.runtime.memory.kv_cache import KvCache
from pcg.runtime.model.batch import Batch
from pcg.runtime.model.runner import ModelRunner
from pcg.runtime.model.step_graphs import RecordedBatch

_FEW_TOKENS = 8
"""The most sequences of a recorded step; a step of more spends less of its time in Python."""
_EAGER_STEPS = 2
"""The steps of a kind before it is recorded, which takes the time of two."""
_MOST_BYTES = 2**25
"""The most memory of all recordings. A step that needs more multiplies for longer than it spends in
Python."""

_Key: TypeAlias = tuple[int, int]
"""The tokens and threads of a step."""


class _HostBatch(RecordedBatch):
    """A batch in memory that is filled for each step."""

    def __init__(self, tokens: int, cache: KvCache) -> None:
        ids, positions, rows = torch.zeros((3, tokens), dtype=torch.int64)
        lists = SimpleNamespace(input_ids=ids, positions=positions, rows=rows, attention=None)
        super().__init__(lists, cache)
        self.known, self.longer_spans, self.uniform_length = {}, [], 0
        self.states = self.routes = None
        self._numbers = 4 * tokens + 2 * tokens * max(cache.pool.size, 1)  # may share pages
        self._rows_of: dict[int, DecodeRows] = {}
        self._latest: Batch | None = None

    def fill(self, batch: Batch) -> None:
        """Take the tokens of a batch."""
        assert batch.rows is not None
        assert self.rows is not None
        self._latest = batch
        self.input_ids.copy_(batch.input_ids)
        self.positions.copy_(batch.positions)
        self.rows.copy_(batch.rows)
        for reach in self._rows_of:
            self._fill_rows(reach, batch)

    def _fill_rows(self, reach: int, batch: Batch) -> None:
        numbers = batch.decode_rows(reach).numbers
        self._rows_of[reach].numbers[: len(numbers)] = numbers

    def decode_rows(self, reach: int) -> DecodeRows:
        if reach not in self._rows_of:
            assert self._latest is not None
            self._rows_of[reach] = DecodeRows(np.zeros(self._numbers, np.int64), self.tokens)
            self._fill_rows(reach, self._latest)
        return self._rows_of[reach]

    def decode_groups(self, reach: int) -> list[DecodeGroup]:
        raise NotRecordedError

    def __getattr__(self, name: str) -> NoReturn:
        raise NotRecordedError(name)


class HostSteps:
    """Recorded steps of a program over a cache.

    Attributes:
        recorded: number of recordings.
        replayed: number of replayed steps.
    """

    def __init__(self, runner: ModelRunner, cache: KvCache) -> None:
        self.recorded = self.replayed = 0
        self._runner, self._cache = runner, cache
        # By adapters: a step, or the number of eager steps that are left before.
        self._steps: WeakKeyDictionary[
            BoundAdapters, dict[_Key, int | tuple[_HostBatch, HostRecording]]
        ] = WeakKeyDictionary()
        self._most = _FEW_TOKENS

    @torch.inference_mode()
    def logits(self, batch: Batch, bound: BoundAdapters) -> Tensor | None:
        """Return the logits [T, V] of a batch of single tokens, valid until the next call.

        None without any effect if the step is not recorded.
        """
        tokens = batch.tokens
        if tokens > self._most or batch.longer_spans or batch.virtual_rows is not None:
            return None
        key, steps = (tokens, torch.get_num_threads()), self._steps.setdefault(bound, {})
        step = steps.get(key, _EAGER_STEPS)
        if isinstance(step, int):
            steps[key] = step - 1
            return None if step else self._recorded(key, batch, bound)
        place, recording = step
        place.fill(batch)
        recording.replay()
        self.replayed += 1
        return recording.result

    def _recorded(self, key: _Key, batch: Batch, bound: BoundAdapters) -> Tensor | None:
        """Record a step that has come before; return its logits, or None."""
        every = (step for steps in self._steps.values() for step in steps.values())
        kept = sum(step[1].size_bytes for step in every if not isinstance(step, int))
        place = _HostBatch(batch.tokens, self._cache)
        place.fill(batch)
        run = partial(self._runner.logits, place, bound)
        try:
            recording = HostRecording(run, _MOST_BYTES - kept)
        except TooLargeError:
            if not kept:
                self._most = batch.tokens - 1
            return None
        except NotRecordedError:
            return None
        self.recorded += 1
        self._steps[bound][key] = place, recording
        return recording.result


def host_steps(runner: ModelRunner, cache: KvCache) -> HostSteps | None:
    """Return the recorded steps of a program.

    None on other devices and by Triton's kernels, over ranks, for models with recurrent states, and
    for a base whose products other processes run.
    """
    weights = runner.weights
    if runner.drawing is not None or cache.states is not None or not is_native(cache.keys):
        return None
    if runner.alike.size > 1 or runner.link is not None or weights.gathered is not None:
        return None
    every = (vars(holder).values() for _, _, holder in weights.holders(runner.model))
    if any(is_remote(weight) for holder in every for weight in holder):
        return None
    return HostSteps(runner, cache)
