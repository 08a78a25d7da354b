"""Update graphs: the end of a step of finetuning as two CUDA graphs.

    clip      the norm of all gradients, by which they are scaled down
    update    the optimizer's step, at a learning rate that lies on the device

Between the two the host reads the norm, as a step whose gradients are not finite changes nothing.
They are recorded at the end of the first step whose gradients all lie in memory that stays
(`own_gradients.py`), or of the second one where the states of the first do not begin with zeros. To
record is to run: what that changes is put back.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pcg.runtime.model.recorder import Recorder
from pcg.runtime.training.recorded.own_gradients import OwnGradients


class UpdateGraphs:
    """The recorded ends of a job's steps.

    Attributes:
        replayed: number of steps that ended by them.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        clip: Callable[[], Tensor],
        gradients: OwnGradients,
        recorder: Recorder,
    ) -> None:
        """Record nothing yet.

        Args:
            optimizer: one of torch's whose learning rate and numbers of steps lie on the device.
            clip: scales the gradients down, and returns the norm that they had.
        """
        self.replayed = 0
        self._optimizer = optimizer
        self._clip = clip
        self._gradients = gradients
        self._recorder: Recorder | None = recorder
        groups = optimizer.param_groups
        self._parameters: Sequence[Tensor] = [p for group in groups for p in group["params"]]
        self._rate: Tensor = groups[0]["lr"]
        self._is_capturable = bool(optimizer.defaults.get("capturable"))
        self._norm: Tensor | None = None
        self._replay_clip: Callable[[], None] | None = None
        self._replay_step: Callable[[], None] | None = None

    @property
    def serves(self) -> bool:
        """True if graphs end the step under way, whose gradients are there."""
        if self._recorder is None or not self._gradients.holds(self._parameters):
            return False
        if self._is_capturable and not self._optimizer.state:
            return False  # which are ones, or the learning rate, as the first step makes them
        return self._replay_step is not None or self._record(self._recorder)

    def clip(self) -> Tensor:
        """Scale the gradients down, and return the norm that they had."""
        assert self._replay_clip is not None
        self._replay_clip()
        assert self._norm is not None
        return self._norm

    def step(self, rate: float) -> None:
        """Update the parameters by their gradients, at this learning rate."""
        assert self._replay_step is not None
        self._rate.fill_(rate)
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
            # Torch asks for this word where a stream is captured, and warns of it elsewhere.
            is_captured = self._rate.is_cuda and torch.cuda.is_current_stream_capturing()
            for group in self._optimizer.param_groups:
                group["capturable"] = is_captured or self._is_capturable
            self._optimizer.step()

        try:
            self._replay_clip = recorder.record(clip)
            self._replay_step = recorder.record(step)
        except Exception as error:
            # Without graphs steps end eagerly: slower, but right.
            self._recorder = None
            warnings.warn(
                "the update of a job could not be recorded as a CUDA graph, and runs without: "
                f"{error}",
                stacklevel=2,
            )
        for group in self._optimizer.param_groups:
            group["capturable"] = self._is_capturable
        torch._foreach_copy_(tensors, before)
        if is_first:  # a state begins with zeros
            for value in (value for state in states.values() for value in state.values()):
                value.zero_()
        return self._recorder is not None
