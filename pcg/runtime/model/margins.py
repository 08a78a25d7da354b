"""Margins: by how much steps take longer than predicted, at a percentile, for each kind of step.

A latency predicts the mean of a load. What is left over differs by what runs together: sequences
that decode, beside them chunks of prompts, windows, or both; backward units, and those of the last
layer, which are shorter, and which an optimizer's update follows. Of each kind the latest errors
are kept, relative to what was predicted, and

    margin = the ⌈(n + 1) p⌉-th smallest of n errors  +  e

The first part is split conformal prediction (Lei et al., "Distribution-Free Predictive Inference
for Regression", 2018): a step exceeds it with probability 1 - p as long as the errors' distribution
stays the same. As it drifts with the load, e follows what happens (Gibbs and Candès, "Adaptive
Conformal Inference Under Distribution Shift", 2021): it begins at 0, rises by η p with an error
above the margin, and falls by η (1 - p) with any other. A margin below 0 corrects a prediction
that is too long for its kind.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from typing import NamedTuple

from pcg.runtime.model.load import Load


class StepKind(NamedTuple):
    """The kind of a step, or of a group of backward units, as far as errors depend on it."""

    has_chunks: bool = False
    has_windows: bool = False
    has_ends: bool = False


def kind_of(load: Load, decoded: Load) -> StepKind:
    """Return the kind of a load, of which a part are sequences that decode."""
    served = load.tokens - load.trained
    return StepKind(served > decoded.tokens, load.windows > 0, load.ends > 0)


class Margins:
    """The margins of one kind of work.

    Attributes:
        percentile: the percentage of steps that end within prediction and margin.
    """

    def __init__(self, percentile: float = 99.0) -> None:
        self.percentile = percentile
        self._kinds: dict[StepKind, _Errors] = {}
        self._steps = 0

    def margin(self, kind: StepKind) -> float:
        """Return the margin of a kind, relative to its predicted time."""
        found = self._kinds.get(kind)
        return _UNKNOWN if found is None else found.margin(self.percentile / 100)

    def observe(self, kind: StepKind, error: float) -> None:
        """Note an error: the time beyond the predicted one, relative to it."""
        found = self._kinds.setdefault(kind, _Errors())
        found.add(self._steps, error, self.percentile / 100)

    def pass_step(self) -> None:
        """Note that a step has passed: errors count for some time, and are then forgotten."""
        self._steps += 1
        for errors in self._kinds.values():
            errors.forget(self._steps - _OLDEST)


class _Errors:
    """The latest errors of a kind, in the order in which they came and by their size."""

    def __init__(self) -> None:
        self._ordered: list[float] = []
        self._latest: deque[tuple[int, float]] = deque()
        self._extra = 0.0

    def margin(self, share: float) -> float:
        count = len(self._ordered)
        if not count:
            return _UNKNOWN
        place = min(math.ceil((count + 1) * share), count) - 1
        found = self._ordered[place] + self._extra
        return found if count >= _FEW else max(found, _UNKNOWN)

    def add(self, step: int, error: float, share: float) -> None:
        is_above = error > self.margin(share)
        self._extra = max(0.0, self._extra + _RATE * (share if is_above else share - 1))
        self._latest.append((step, error))
        insort(self._ordered, error)
        if len(self._latest) > _KEPT:
            self._drop()

    def forget(self, before: int) -> None:
        while self._latest and self._latest[0][0] < before:
            self._drop()

    def _drop(self) -> None:
        _, error = self._latest.popleft()
        del self._ordered[bisect_left(self._ordered, error)]


_KEPT = 256
"""The most errors of a kind."""
_OLDEST = 1024
"""An error counts for so many steps, so that a kind that was held up once is tried again."""
_FEW = 16
"""Below so many errors the margin is at least that of a kind without any."""
_UNKNOWN = 0.1
"""The margin of a kind that never ran."""
_RATE = 0.02
"""The rate η at which the margin follows what happens."""
