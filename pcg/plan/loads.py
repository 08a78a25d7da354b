"""Steady state of a serving replica, and the speed of finetuning with and without requests.

Each step generates one token for each of n running requests. A prompt of P tokens takes
j = ⌈P / most tokens of a step⌉ of these steps; q prompts are read together:

    d(n)        seconds of a step that only generates
    p(n, q)     seconds of a step that also reads q prompts
    r(n, q) = (O - 1) d(n) / n + j (p(n, q) - d(n)) / q         device seconds per request
    λ = 1 / r(n, q)                                             rate served at n requests
    TPOT = n / (λ (O - 1))                                      Little's law
    ρ = λ j p(n, q) / q                                         share of steps with prompts, ≤ 1
    TTFT = TPOT / 2 + j p(n, q) (1 + ρ / (2 (1 - ρ)))           running step, M/D/1 queue, reading
    N = n + λ TTFT                                              requests that hold pages

Over ranks, d and p are at least the host's launch time of a step, and windows are added.

The load of a rate is the fewest n that serves the rate. Times are those of the cost model at
`BATCHES`, interpolated linearly; as a roofline is convex, that is an upper bound. Times are means:
they exclude bursts and variable lengths.

Finetuning alone: an optimizer step takes k batches forward and backward, and the update:

    step = k (forward + loss + backward of all layers) + update

Replicas divide the sequences of a step, and sum the adapter's gradients once. If replicas shard the
base, the gather of a layer overlaps with the layer before; the excess is waiting time.

Finetuning beside requests (co-serving): each engine step adds a window of w tokens to the requests'
tokens, then backward units of as many tokens. Requests take the share ρ(τ) of a step of τ seconds,
in which n = λ (O - 1) τ requests run:

    forward(n, w) - forward(n, 0) + backward(w) = (1 - ρ(τ)) τ,      w / τ tokens a second

τ is the promised time per token, or less if the window reaches the most tokens of a step or the
requests' pages fill the memory.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from pcg.kernels.sizes import PAGE_TOKENS
from pcg.parallel.costs.step_costs import SequenceChunk, StepCosts, StepShape
from pcg.plan.rank_plan import TrainingChoice
from pcg.plan.workload import Serving, Training

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024)
"""Batches at which the cost model is evaluated."""
_NEAR = 1e-3
"""Relative accuracy of rates and of a step's seconds."""


@dataclass(frozen=True)
class Load:
    """A steady state of a replica.

    Attributes:
        running: the mean number of generating requests.
        in_flight: the mean number of requests that hold pages.
        busy: the share of time that requests take.
    """

    rate_per_s: float
    running: float
    in_flight: float
    tpot_s: float
    ttft_s: float
    busy: float = 1.0

    def tokens(self, serving: Serving) -> int:
        """Return the tokens of all held pages, if requests hold pages for their whole length."""
        pages = -(-serving.tokens // PAGE_TOKENS)
        return math.ceil(self.in_flight) * pages * PAGE_TOKENS


@dataclass(frozen=True)
class Served:
    """The requests that a replica serves, and its limits.

    Attributes:
        adapters: the number of adapters that requests use.
        rank: the adapters' rank.
        most_running: the maximum number of running requests.
        most_tokens: the maximum number of tokens of a step.
    """

    serving: Serving
    adapters: int
    rank: int
    most_running: int
    most_tokens: int

    @property
    def prompt_steps(self) -> int:
        """The number of steps that read a prompt."""
        return -(-self.serving.prompt_tokens // self.most_tokens)


class ServingSteps:
    """Times of a replica's serving steps."""

    def __init__(self, costs: StepCosts, served: Served, host_s: float = 0.0) -> None:
        """Use times of `costs`; a serving step takes at least `host_s` to launch."""
        self._costs = costs
        self._host_s = host_s
        self.served = served
        self.serving = served.serving
        self.prompt_steps = served.prompt_steps
        most = max(1, served.most_tokens // self.serving.prompt_tokens)
        self.prompts = tuple(2**power for power in range(most.bit_length()))
        self._known: dict[tuple[int, int, int], float] = {}

    def seconds(self, running: float, prompts: int = 0, trained: int = 0) -> float:
        """Return the seconds of a step.

        Args:
            running: the number of generating requests; between batches, times are interpolated.
            prompts: the number of prompts, or of prompt chunks, that the step reads.
            trained: the tokens of a finetuning window that the step also forwards.
        """
        most = self.served.most_running
        sizes = [size for size in BATCHES if size < most] + [most]
        place = min(bisect_left(sizes, running), len(sizes) - 1)
        high = sizes[place]
        low = sizes[place - 1] if place else 0
        above = self._at(high, prompts, trained)
        if high == running or (not low and not prompts and not trained):
            return above
        below = self._at(low, prompts, trained)
        return below + (above - below) * (running - low) / (high - low)

    def load(self, rate_per_s: float) -> Load | None:
        """Return the steady state at a rate; None if the rate exceeds the replica's capacity."""
        for prompts in self.prompts:
            if self._rate(self.served.most_running, prompts) < rate_per_s:
                continue
            load = self._load(rate_per_s, self._running(rate_per_s, prompts), prompts)
            if load is not None:
                return load
        return None

    def busy(self, rate_per_s: float, running: float) -> float:
        """Return the share of time that requests take; 1 or more means overload."""
        requests = max(1.0, running)  # with fewer than one, steps pause
        return rate_per_s * min(self._request_seconds(requests, q) for q in self.prompts)

    def most_rate(self, keeps: Callable[[Load], bool]) -> float:
        """Return the highest rate with a steady state that meets a condition, or 0."""

        def is_kept(rate_per_s: float) -> bool:
            load = self.load(rate_per_s)
            return load is not None and keeps(load)

        high = max(self._rate(self.served.most_running, prompts) for prompts in self.prompts)
        low = 0.0
        if is_kept(high):
            return high
        while high - low > _NEAR * high and high > 1e-6:
            middle = (low + high) / 2
            low, high = (middle, high) if is_kept(middle) else (low, middle)
        return low

    def _load(self, rate_per_s: float, running: float, prompts: int) -> Load | None:
        tpot_s = running / (rate_per_s * (self.serving.output_tokens - 1))
        reading_s = self.prompt_steps * self.seconds(running, prompts)
        share = rate_per_s * reading_s / prompts
        if share >= 1:
            return None
        ttft_s = tpot_s / 2 + reading_s * (1 + share / (2 * (1 - share)))
        busy = self.busy(rate_per_s, running)
        in_flight = running + rate_per_s * ttft_s
        return Load(rate_per_s, running, in_flight, tpot_s, ttft_s, busy)

    def _running(self, rate_per_s: float, prompts: int) -> float:
        """Return approximately the fewest running requests that serve a rate."""
        low, high = 0.0, float(self.served.most_running)
        while high - low > _NEAR * high:
            middle = (low + high) / 2
            is_served = self._rate(middle, prompts) >= rate_per_s
            low, high = (low, middle) if is_served else (middle, high)
        return high

    def _rate(self, running: float, prompts: int) -> float:
        return 1 / self._request_seconds(running, prompts)

    def _request_seconds(self, running: float, prompts: int) -> float:
        alone_s = self.seconds(running)
        generating_s = (self.serving.output_tokens - 1) * alone_s / running
        reading_s = self.prompt_steps * (self.seconds(running, prompts) - alone_s) / prompts
        return generating_s + reading_s

    def _at(self, running: int, prompts: int, trained: int) -> float:
        key = (running, prompts, trained)
        if key not in self._known:
            seconds = self._costs.step_seconds(step_shape(self.served, *key))
            if trained:
                alone_s = self._costs.step_seconds(step_shape(self.served, running, prompts, 0))
                self._known[key] = seconds + max(0.0, self._host_s - alone_s)
            else:
                self._known[key] = max(seconds, self._host_s)
        return self._known[key]


@lru_cache(maxsize=4096)
def step_shape(served: Served, running: int, prompts: int, trained: int) -> StepShape:
    """Return the shape of a step, equal on all devices; see `ServingSteps.seconds`."""
    serving = served.serving
    chunk = -(-serving.prompt_tokens // served.prompt_steps)
    before = (serving.prompt_tokens - chunk) // 2
    context = serving.prompt_tokens + serving.output_tokens // 2
    chunks = [(1, context)] * running + [(chunk, before)] * prompts
    pieces = []
    for place, (tokens, behind) in enumerate(chunks):
        adapter = place % served.adapters if served.adapters else None
        rank = served.rank if served.adapters else 0
        pieces.append(SequenceChunk(tokens, behind, True, False, adapter, rank))
    if trained:
        pieces.append(SequenceChunk(trained, 0, False, True, "trained", served.rank))
    return StepShape.of(pieces)


def interpolated(points: list[tuple[float, float]], y: float) -> float:
    """Return the x at which an increasing, piecewise linear function reaches y, or its last x."""
    for (x_0, y_0), (x_1, y_1) in pairwise(points):
        if y <= y_1:
            return x_0 + (x_1 - x_0) * max(0.0, y - y_0) / max(y_1 - y_0, 1e-30)
    return points[-1][0]


# ------------------------------------------------------------------------------------ training load


_WINDOWS = (64, 256, 1024, 4096)
"""Window sizes, in tokens, at which the cost model is evaluated."""


@dataclass(frozen=True)
class CoServed:
    """A steady state with finetuning: the requests' load, and trained tokens per second."""

    load: Load
    tokens_per_s: float


def step_seconds(costs: StepCosts, training: Training, choice: TrainingChoice, rank: int) -> float:
    """Return the seconds of an optimizer step without requests."""
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
    """Return the seconds that the layers of a step wait for gathers.

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
    """Finetuning windows within the steps of a serving replica."""

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
            alone: the steady state without finetuning; it must meet the promise and fit the memory.
            tpot_slo_s: the promised time per output token, or None.
            fits: returns whether a steady state fits the memory.
        """

        def kept(step_s: float) -> CoServed | None:
            state = self._at(alone.rate_per_s, step_s)
            return state if state is not None and fits(state.load) else None

        low, high = alone.tpot_s, self._longest_s if tpot_slo_s is None else tpot_slo_s
        best = kept(high)
        if best is not None:
            return best
        while high - low > _NEAR * high:
            middle = (low + high) / 2
            state = kept(middle)
            low, high = (low, middle) if state is None else (middle, high)
            best = state or best
        return best

    @property
    def _longest_s(self) -> float:
        """Upper bound of a step's seconds: the most requests with the longest window."""
        most = self._steps.served.most_running
        return self._steps.seconds(most) + self._window_seconds(most)[-1][1]

    def _at(self, rate_per_s: float, step_s: float) -> CoServed | None:
        """Return the steady state of steps of `step_s`; None if the work does not fit a step."""
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
        """Return the seconds that windows add to a step of this many requests, by window size."""
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
