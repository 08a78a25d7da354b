"""The choice of a window's length: with which tokens of a job get furthest in the time it has.

A window of s tokens goes forward once, whole beside what a step serves or in L parts of a layer,
and back in L parts. In the latest seconds so many windows would have gone

    forward    F = steps with room for it + idle time / its time,   or parts of a layer / L
    back       B = parts of a layer / L
    both       1 / (1 / F + 1 / B)

so that s / (1 / F + 1 / B) tokens are trained; the s and the way forward for which they are the
most are chosen. Short windows fit into what steps leave, and have more of what each part takes
however short it is; long ones wait for idle time.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from pcg.runtime.engine.latency import Latencies, Latency
from pcg.runtime.engine.sharing.step import Step
from pcg.runtime.engine.sharing.time_left import TimeLeft
from pcg.runtime.model.load import Load
from pcg.runtime.training.work_units import Forward


class BestWindow(NamedTuple):
    """The tokens of windows, and whether they go forward in parts of a layer."""

    tokens: int
    in_layers: bool


class WindowChoice:
    """Chooses how long windows are, and keeps to it for some steps."""

    def __init__(self, left: TimeLeft) -> None:
        self._left = left
        self._chosen: BestWindow | None = None
        self._decoded = Load(1, sampled=1)
        self._steps = 0

    def pass_step(self) -> None:
        """Note that a step has passed, after some of which the choice is made anew."""
        self._steps += 1
        if self._steps % _STEPS == 0:
            self._chosen = None

    def best(self, step: Step, unit: Forward, latencies: Latencies) -> BestWindow:
        """Return the windows with which a job gets furthest, at least `least_chunk` tokens each."""
        if step.is_served:
            self._decoded = step.decoded
        if self._chosen is None:
            self._chosen = self._best(step, unit, latencies)
        room = step.limits.tokens - step.load.tokens
        return self._chosen._replace(tokens=min(self._chosen.tokens, room))

    def _best(self, step: Step, unit: Forward, latencies: Latencies) -> BestWindow:
        limits, chosen, most = step.limits, BestWindow(step.limits.least_chunk, False), 0.0
        tokens = limits.least_chunk
        while tokens <= limits.tokens:
            load = Load.of(tokens, unit.context)
            alone_s = latencies.forward.seconds(Load.of_window(tokens, unit.context))
            back_s = latencies.backward.seconds(load)
            if most and max(alone_s, 2 * back_s) > limits.idle_step_s:
                break
            back = self._parts(latencies.backward, load, unit.layers)
            whole, in_layers = self._forward(latencies, tokens, unit)
            for forward, is_cut in ((whole, False), (in_layers, True)):
                if forward > 0 and back > 0:
                    found = tokens / (1 / forward + 1 / back)
                    if found > most:
                        chosen, most = BestWindow(tokens, is_cut), found
            tokens = max(tokens + 1, int(_RATIO * tokens))
        return chosen

    def _forward(self, latencies: Latencies, tokens: int, unit: Forward) -> tuple[float, float]:
        """Return the windows that go forward whole, and in layers; in idle time all are whole."""
        decoded, forward = self._decoded, latencies.forward
        window = Load.of_window(tokens, unit.context)
        load, alone_s = decoded + window, forward.seconds(window)
        bound_s = forward.bound_s(load, decoded) - forward.bound_s(decoded, decoded)
        whole = self._left.steps_with(bound_s)
        used_s = whole * (forward.seconds(load) - forward.seconds(decoded))
        of_layer = Load.of(tokens, unit.context)
        layer_s = latencies.layer.seconds(of_layer)
        parts = self._left.pieces(layer_s, latencies.layer.bound_s(of_layer))
        idle = self._left.idle_s(used_s), self._left.idle_s(parts * layer_s)
        return whole + idle[0] / alone_s, parts / max(unit.layers, 1) + idle[1] / alone_s

    def _parts(self, latency: Latency, load: Load, layers: int) -> float:
        """Return the windows that go back through all layers."""
        if not layers:
            return math.inf
        seconds = latency.seconds(load)
        served = self._left.pieces(seconds, latency.bound_s(load))
        return (served + self._left.idle_s(served * seconds) / seconds) / layers


_STEPS = 16
"""The number of steps after which the choice is made anew."""
_RATIO = 1.15
"""Each length that is tried, relative to the one before it."""
