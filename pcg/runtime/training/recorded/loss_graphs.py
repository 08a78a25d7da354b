"""Loss graphs: the loss of some target tokens and its gradients as CUDA graphs, by their number.

The rule of sharing says how many tokens have their loss computed in a step, so there is a graph for
each of a few sizes (`window_sizes.py`). One reads the tokens' hidden states and targets from memory
of its own, and writes the sum of the losses and the gradients of the hidden states:

    hidden states ──▶ its memory ──▶ final norm, head, cross entropy, and back ──▶ gradients

A part that is not filled has no target, so its losses and gradients are zeros. A size is recorded
when it comes the second time.
"""

from __future__ import annotations

import warnings
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pcg.kernels.table_cache import kept_tables
from pcg.runtime.data.example import IGNORED
from pcg.runtime.memory.kv_cache import KvCache
from pcg.runtime.model.merged_execution import run_single
from pcg.runtime.model.recorder import Recorder
from pcg.runtime.training.recorded.own_gradients import OwnGradients
from pcg.runtime.training.recorded.recorded_batch import RecordedTokens
from pcg.runtime.training.recorded.recorded_program import RecordedProgram
from pcg.runtime.training.recorded.window_sizes import SIZES


@dataclass
class _Loss:
    """The loss of so many tokens.

    Attributes:
        inputs: the hidden states, and what else the epilogue reads of each token.
        targets, slopes: of each token, its target and the weight of its loss.
        replay: the recorded function.
        total, gradients: what it writes: the sum of the losses, and gradients of the hidden states.
        kept: tables that it reads.
    """

    inputs: Sequence[Tensor]
    targets: Tensor
    slopes: Tensor
    replay: Callable[[], None] = lambda: None
    total: Tensor = field(default_factory=lambda: torch.zeros(()))
    gradients: Sequence[Tensor] = ()
    kept: Sequence[object] = ()


class LossGraphs:
    """The recorded losses of one job.

    Attributes:
        recorded, replayed: numbers of graphs, and of losses that they computed.
    """

    def __init__(
        self,
        program: RecordedProgram,
        gradients: OwnGradients,
        cache: KvCache,
        recorder: Recorder,
    ) -> None:
        self.recorded = self.replayed = 0
        self._program = program
        self._gradients = gradients
        self._cache = cache
        self._recorder: Recorder | None = recorder
        self._losses: dict[int, _Loss] = {}
        self._came: Counter[int] = Counter()

    def fitting(self, tokens: int, left: int) -> int:
        """Return how many of `left` tokens have their loss computed at once, of up to `tokens`."""
        if left <= tokens or tokens < SIZES[0]:
            return min(tokens, left, SIZES[-1])
        return SIZES[bisect_right(SIZES, tokens) - 1]

    def warm_up(self, inputs: Sequence[Tensor], most: int) -> None:
        """Record all sizes of up to so many tokens, the largest first.

        Args:
            inputs: hidden states, and what else the epilogue reads of a window.
        """
        for size in reversed(SIZES[: bisect_left(SIZES, most) + 1]):
            if size not in self._losses and self._recorder is not None:
                self._record(size, inputs)

    def run(
        self, inputs: Sequence[Tensor], rows: Tensor, targets: Tensor, weight: float
    ) -> tuple[Tensor, list[Tensor]] | None:
        """Return the sum of the losses of some tokens, fp64, and the gradients by their states.

        None, having done nothing, if no graph serves them. The next call overwrites the gradients.

        Args:
            inputs: the hidden states of a window, and what else the epilogue reads, [T, …].
            rows: the tokens, [n].
            targets: the target of each, [n].
            weight: the weight of each token's loss.
        """
        count = len(rows)
        place = bisect_left(SIZES, count)
        if place == len(SIZES) or self._recorder is None:
            return None
        size = SIZES[place]
        if size not in self._losses and not (self._is_time(size) and self._record(size, inputs)):
            return None
        loss = self._losses[size]
        for to, x in zip(loss.inputs, inputs, strict=True):
            to[:count] = x[rows]
            to[count:] = 0
        loss.targets[:count] = targets
        loss.targets[count:] = IGNORED
        loss.slopes.fill_(weight)
        self._gradients.hold(self._program.trained_in_loss())
        loss.replay()
        self.replayed += 1
        return loss.total.clone(), [x[:count] for x in loss.gradients]

    def _is_time(self, size: int) -> bool:
        """Return whether a size has come before."""
        self._came[size] += 1
        return self._came[size] > 1

    def _record(self, size: int, inputs: Sequence[Tensor]) -> bool:
        """Record a size; returns False if the device does not."""
        assert self._recorder is not None
        made = [x.new_zeros((size, *x.shape[1:])) for x in inputs]
        device = made[0].device
        wide = torch.float64 if made[0].dtype == torch.float64 else torch.float32
        loss = _Loss(
            made,
            torch.full((size,), IGNORED, device=device),
            torch.zeros(size, dtype=wide, device=device),
        )
        batch = RecordedTokens(size, self._cache, device)

        def run() -> None:
            requests = self._program.loss_of(batch, loss.inputs, loss.targets, loss.slopes)
            losses, loss.gradients = run_single(requests)
            loss.total = losses.sum(dtype=torch.float64)

        self._gradients.hold(self._program.trained_in_loss())
        try:
            with kept_tables() as loss.kept:
                loss.replay = self._recorder.record(run)
        except Exception as error:
            # Without graphs losses are computed eagerly: slower, but right.
            self._recorder = None
            warnings.warn(
                "a loss of finetuning could not be recorded as a CUDA graph, and more of the job "
                f"are not tried: {error}",
                stacklevel=2,
            )
            return False
        self._losses[size] = loss
        self.recorded += 1
        return True
