"""Finetuning on one replica: alone, and beside requests.

Alone, an optimizer step takes k batches forward and backward, and the update:

    step = k (forward + loss + backward of all layers) + update

Replicas take a part of its sequences each, and sum the adapter's gradients once. With parts of the
base, a layer is gathered while the one before runs, and waits for what takes longer than that.

Beside requests (co-serving), each step of the engine has a window of w tokens after the requests'
own, then backward units for as many; requests take the share ρ(τ) of a step of τ seconds, in which
n = λ (O - 1) τ of them run:

    forward(n, w) - forward(n, 0) + backward(w) = (1 - ρ(τ)) τ,      w / τ tokens a second

τ is the promised time per token, or shorter where the window reaches the most tokens of a step, or
the requests' pages the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pcg.parallel.costs.step_costs import SequenceChunk, StepCosts, StepShape
from pcg.plan.rank_plan import TrainingChoice
from pcg.plan.serving_load import BATCHES, Load, ServingSteps, interpolated
from pcg.plan.workload import Training

_NEAR = 1e-3
"""The relative accuracy of a step's seconds."""
_WINDOWS = (64, 256, 1024, 4096)
"""The tokens of windows whose times the cost model is asked for."""


@dataclass(frozen=True)
class CoServed:
    """A steady state with finetuning in it: the requests', and tokens a second that are trained."""

    load: Load
    tokens_per_s: float


def step_seconds(costs: StepCosts, training: Training, choice: TrainingChoice, rank: int) -> float:
    """Return the seconds of an optimizer step where nothing is served."""
    shape = _shape(training, choice, rank)
    batch_s = costs.step_seconds(shape) + behind_seconds(costs, shape)
    return choice.accumulation * batch_s + costs.update_seconds()


def waiting_seconds(
    costs: StepCosts,
    training: Training,
    choice: TrainingChoice,
    rank: int,
    gathers: Sequence[float],
) -> float:
    """Return the seconds for which the layers of a step wait until they are gathered.

    Args:
        gathers: the seconds of each gather of a batch, in the order of the layers.
    """
    shape = _shape(training, choice, rank)
    layers = range(costs.layers)
    times = [costs.layer_seconds(layer, shape) for layer in layers]
    times += [costs.backward_seconds(layer, shape) for layer in reversed(layers)]
    waits = (max(gather - time, 0.0) for gather, time in zip(gathers, times, strict=False))
    return choice.accumulation * sum(waits)


def behind_seconds(costs: StepCosts, shape: StepShape) -> float:
    """Return the seconds of the loss, and of backward through all layers."""
    backward_s = sum(costs.backward_seconds(layer, shape) for layer in range(costs.layers))
    return costs.loss_seconds(shape.tokens) + backward_s


def _shape(training: Training, choice: TrainingChoice, rank: int) -> StepShape:
    chunk = SequenceChunk(training.seq, 0, False, True, "trained", rank)
    return StepShape.of([chunk] * choice.batch)


class CoServing:
    """Finetuning windows within the steps of a replica that serves."""

    def __init__(self, steps: ServingSteps, costs: StepCosts, training: Training) -> None:
        self._steps = steps
        self._costs = costs
        self._training = training
        self._known: dict[int, list[tuple[float, float]]] = {}
        most = max(_WINDOWS[0], steps.served.most_tokens)
        self._windows = [*(w for w in _WINDOWS if w < most), most]

    def find(
        self, alone: Load, tpot_slo_s: float | None, fits: Callable[[Load], bool]
    ) -> CoServed | None:
        """Return the steady state with the longest steps that the promise and the memory allow.

        Args:
            alone: the steady state without finetuning, which keeps both.
            tpot_slo_s: the promise; None for none.
            fits: says of a steady state if the memory holds it.
        """

        def kept(step_s: float) -> CoServed | None:
            found = self._at(alone.rate_per_s, step_s)
            return found if found is not None and fits(found.load) else None

        low, high = alone.tpot_s, self._longest_s if tpot_slo_s is None else tpot_slo_s
        best = kept(high)
        if best is not None:
            return best
        while high - low > _NEAR * high:
            middle = (low + high) / 2
            found = kept(middle)
            low, high = (low, middle) if found is None else (middle, high)
            best = found or best
        return best

    @property
    def _longest_s(self) -> float:
        """Seconds that no step exceeds: that of most requests with the longest window."""
        most = self._steps.served.most_running
        return self._steps.seconds(most) + self._window_seconds(most)[-1][1]

    def _at(self, rate_per_s: float, step_s: float) -> CoServed | None:
        """Return the steady state of steps of some seconds; None if a step does not hold it."""
        steps, served = self._steps, self._steps.served
        running = rate_per_s * (steps.serving.output_tokens - 1) * step_s
        if running > served.most_running:
            return None
        busy = steps.busy(rate_per_s, running)
        room_s = (1 - busy) * step_s
        points = self._window_seconds(running)
        prompts = rate_per_s * step_s * steps.serving.prompt_tokens
        most = served.most_tokens - running - prompts
        if busy >= 1 or most <= 0 or room_s > points[-1][1]:
            return None
        window = interpolated(points, room_s)
        if window > most:
            return None
        ttft_s = step_s * (0.5 + steps.prompt_steps)
        load = Load(rate_per_s, running, running + rate_per_s * ttft_s, step_s, ttft_s, busy)
        update_s = self._costs.update_seconds() * window / self._training.tokens
        return CoServed(load, window / (step_s + update_s))

    def _window_seconds(self, running: float) -> list[tuple[float, float]]:
        """Return the seconds that windows add to a step of so many requests, by their tokens."""
        size = next((size for size in BATCHES if size >= running), self._steps.served.most_running)
        size = min(size, self._steps.served.most_running)
        if size not in self._known:
            alone_s = self._steps.seconds(size)
            points = [(0.0, 0.0)]
            for window in self._windows:
                chunk = SequenceChunk(window, max(0, self._training.seq - window) // 2)
                behind_s = behind_seconds(self._costs, StepShape.of([chunk]))
                forward_s = self._steps.seconds(size, trained=window) - alone_s
                points.append((float(window), forward_s + behind_s))
            self._known[size] = points
        return self._known[size]
