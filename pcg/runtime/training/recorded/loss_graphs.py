"""Loss graphs: the loss of target tokens and its gradients as CUDA graphs of a few sizes.

The sharing rule chooses the number of tokens in the loss of a step, so graphs are recorded for a
few sizes (`window_sizes.py`). A graph reads the hidden states and targets from fixed memory, and
writes the sum of the losses and the gradients of the hidden states:

    hidden states ──▶ fixed memory ──▶ final norm, head, cross entropy, and back ──▶ gradients

Unused rows have no target, so their losses and gradients are zeros. A size is recorded at its
second use. Evaluation has its own graphs, without gradients.

The end of a step is two CUDA graphs:

    clip      the norm of all gradients, and their scaling
    update    the optimizer's step, at a learning rate on the device

The host reads the norm between the two graphs, as a step with non-finite gradients must not update.
Both are recorded at the end of the first step with all gradients in fixed memory, or of the second
step if the optimizer's initial states are not zeros. Recording runs the step, so the changed
tensors are restored.
"""

from __future__ import annotations

import warnings
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from pcg.kernels.devices import kept_tables
from pcg.runtime.data.example import IGNORED
from pcg.runtime.memory.kv_cache import KvCache
from pcg.runtime.model.batch import Batch
from pcg.runtime.model.merged_execution import run_single
from pcg.runtime.model.step_graphs import Recorder, check_memory
from pcg.runtime.training.recorded.recorded_program import (
    OwnGradients,
    RecordedProgram,
    RecordedTokens,
)
from pcg.runtime.training.recorded.window_sizes import SIZES
from pcg.units import counted


class ComputedLoss(NamedTuple):
    """The loss of some tokens.

    Attributes:
        total: the sum of the losses, fp64.
        gradients: the gradients of the hidden states; empty without training.
    """

    total: Tensor
    losses: Tensor
    gradients: Sequence[Tensor] = ()


@dataclass
class _Loss:
    """The loss of a size: its inputs, the recorded function, and its outputs."""

    batch: RecordedTokens
    inputs: Sequence[Tensor]
    targets: Tensor
    slopes: Tensor
    replay: Callable[[], None] = lambda: None
    computed: ComputedLoss = field(default_factory=lambda: ComputedLoss(*torch.zeros(2)))
    kept: Sequence[object] = ()


class LossGraphs:
    """The recorded losses of a job."""

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
        self._is_warming = False
        self._losses: dict[tuple[int, bool], _Loss] = {}
        self._came: Counter[tuple[int, bool]] = Counter()

    def fitting(self, tokens: int, left: int) -> int:
        """Return the size of the next loss chunk: up to `tokens` of `left` remaining tokens."""
        if left <= tokens or tokens < SIZES[0]:
            return min(tokens, left, SIZES[-1])
        return SIZES[bisect_right(SIZES, tokens) - 1]

    def warm_up(self, inputs: Sequence[Tensor], most: int) -> None:
        """Record all sizes up to `most`, the largest first.

        Args:
            inputs: the epilogue's inputs for a window.
        """
        self._is_warming = True
        for size in reversed(SIZES[: bisect_left(SIZES, most) + 1]):
            for trains in (True, False):
                if (size, trains) not in self._losses and self._recorder is not None:
                    self._record(size, trains, inputs)
        self._is_warming = False

    def run(
        self,
        inputs: Sequence[Tensor],
        rows: Tensor,
        targets: Tensor,
        slopes: float | Tensor | None,
        batch: Batch | None = None,
    ) -> ComputedLoss | None:
        """Return the losses of tokens, and the gradients of their hidden states.

        Returns None without any effect if no graph fits. The next call overwrites losses and
        gradients, but not the sum.

        Args:
            inputs: the epilogue's inputs for a window, [T, …].
            rows: the tokens, [n].
            targets: the target of each token, [n].
            slopes: a weight for all losses, or a weight for each, [n]; None for no gradients.
        """
        count, trains = len(rows), slopes is not None
        place = bisect_left(SIZES, count)
        if place == len(SIZES) or self._recorder is None:
            return None
        size = SIZES[place]
        if (size, trains) not in self._losses:
            self._came[size, trains] += 1
            if self._came[size, trains] == 1 or not self._record(size, trains, inputs):
                return None
        loss = self._losses[size, trains]
        for to, x in zip(loss.inputs, inputs, strict=True):
            to[:count] = x[rows]
            to[count:] = 0
        if batch is not None:
            loss.batch.take_dropped(batch, rows)
        loss.targets[:count] = targets
        loss.targets[count:] = IGNORED
        if isinstance(slopes, Tensor):
            loss.slopes[:count] = slopes
            loss.slopes[count:] = 0
        elif slopes is not None:
            loss.slopes.fill_(slopes)
        if trains:
            self._gradients.hold(self._program.trained_in_loss())
        loss.replay()
        self.replayed += 1
        total, losses, gradients = loss.computed
        return ComputedLoss(total.clone(), losses[:count], [x[:count] for x in gradients])

    def _record(self, size: int, trains: bool, inputs: Sequence[Tensor]) -> bool:
        """Record a size; return False if recording failed."""
        assert self._recorder is not None
        held = [x.new_zeros((size, *x.shape[1:])) for x in inputs]
        device = held[0].device
        wide = torch.float64 if held[0].dtype == torch.float64 else torch.float32
        batch = RecordedTokens(size, self._cache, device)
        loss = _Loss(
            batch,
            held,
            torch.full((size,), IGNORED, device=device),
            torch.zeros(size, dtype=wide, device=device),
        )

        def run() -> None:
            gradients: Sequence[Tensor] = ()
            if trains:
                requests = self._program.loss_of(batch, loss.inputs, loss.targets, loss.slopes)
                losses, gradients = run_single(requests)
            else:
                losses = run_single(self._program.loss_alone(batch, loss.inputs, loss.targets))
            loss.computed = ComputedLoss(losses.sum(dtype=torch.float64), losses, gradients)

        if trains:
            self._gradients.hold(self._program.trained_in_loss())
        try:
            with kept_tables() as loss.kept:
                loss.replay = self._recorder.record(run)
        except Exception as error:
            if self._is_warming:
                what = f"a loss of {counted(size, 'token')}"
                check_memory(error, what, self._cache.size_bytes)
            # Continue eagerly: slower, but correct.
            self._recorder = None
            warnings.warn(
                "a loss of finetuning could not be recorded as a CUDA graph; the job's losses now "
                f"run eagerly: {error}",
                stacklevel=2,
            )
            return False
        self._losses[size, trains] = loss
        self.recorded += 1
        return True


class UpdateGraphs:
    """The recorded ends of a job's steps."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        clip: Callable[[], Tensor],
        gradients: OwnGradients,
        recorder: Recorder,
    ) -> None:
        """Create the graphs without recording.

        Args:
            optimizer: an optimizer with its learning rate and step counts on the device.
            clip: clips the gradients, and returns their norm before clipping.
        """
        self.replayed = 0
        self._optimizer = optimizer
        self._clip = clip
        self._gradients = gradients
        self._recorder: Recorder | None = recorder
        groups = optimizer.param_groups
        self._parameters: Sequence[Tensor] = [p for group in groups for p in group["params"]]
        self._is_cuda = bool(groups[0]["lr"].is_cuda)
        self._is_capturable = bool(optimizer.defaults.get("capturable"))
        self._norm: Tensor | None = None
        self._replay_clip: Callable[[], None] | None = None
        self._replay_step: Callable[[], None] | None = None

    @property
    def serves(self) -> bool:
        """True if graphs can end this step; read after all gradients are computed."""
        if self._recorder is None or not self._gradients.holds(self._parameters):
            return False
        if self._is_capturable and not self._optimizer.state:
            return False  # the first step initialises states with ones or the learning rate
        return self._replay_step is not None or self._record(self._recorder)

    def clip(self) -> Tensor:
        """Clip the gradients, and return their norm before clipping."""
        assert self._replay_clip is not None
        self._replay_clip()
        assert self._norm is not None
        return self._norm

    def step(self, rate: float) -> None:
        """Update the parameters by their gradients, at the given learning rate."""
        assert self._replay_step is not None
        for group in self._optimizer.param_groups:
            group["lr"].fill_(rate * group.get("ratio", 1.0))
        self._replay_step()
        self.replayed += 1

    @torch.no_grad()
    def _record(self, recorder: Recorder) -> bool:
        states = self._optimizer.state
        tensors = [*self._parameters, *(p.grad for p in self._parameters if p.grad is not None)]
        tensors += [value for p in self._parameters for value in states.get(p, {}).values()]
        before = [x.clone() for x in tensors]
        is_first = not states

        def clip() -> None:
            self._norm = self._clip()

        def step() -> None:
            # Torch requires this flag during capture, and warns about it otherwise.
            is_captured = self._is_cuda and torch.cuda.is_current_stream_capturing()
            for group in self._optimizer.param_groups:
                group["capturable"] = is_captured or self._is_capturable
            self._optimizer.step()

        try:
            self._replay_clip = recorder.record(clip)
            self._replay_step = recorder.record(step)
        except Exception as error:
            # Continue eagerly: slower, but correct.
            self._recorder = None
            warnings.warn(
                "the update of a job could not be recorded as a CUDA graph, and runs eagerly: "
                f"{error}",
                stacklevel=2,
            )
        for group in self._optimizer.param_groups:
            group["capturable"] = self._is_capturable
        torch._foreach_copy_(tensors, before)
        if is_first:  # initial states are zeros
            for value in (value for state in states.values() for value in state.values()):
                value.zero_()
        return self._recorder is not None
