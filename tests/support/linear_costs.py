"""Costs of a device whose steps take as long as predicted: fast to simulate."""

from __future__ import annotations

from dataclasses import dataclass

from pcg.parallel.costs.step_costs import StepShape
from pcg.runtime.admission.latency import Latencies, Latency


@dataclass(frozen=True)
class LinearCosts:
    """See `pcg.parallel.costs.step_costs.StepCosts`.

    Attributes:
        layers: of the model.
        constant_s: of a step.
        token_s: of a token.
        key_s: of a key.
        copy_bytes_per_s: of adapters.
    """

    layers: int = 2
    constant_s: float = 0.01
    token_s: float = 1e-4
    key_s: float = 1e-8
    copy_bytes_per_s: float = 1e6

    def step_seconds(self, shape: StepShape) -> float:
        return self.constant_s + self.token_s * shape.tokens + self.key_s * shape.pairs

    def layer_seconds(self, layer: int, shape: StepShape) -> float:
        return self.step_seconds(shape) / self.layers

    def loss_seconds(self, tokens: int) -> float:
        return self.token_s * tokens

    def backward_seconds(self, layer: int, shape: StepShape) -> float:
        return 2 * self.step_seconds(shape) / self.layers

    def update_seconds(self) -> float:
        return self.constant_s

    def copy_seconds(self, size_bytes: int) -> float:
        return size_bytes / self.copy_bytes_per_s


def certain(*latencies: Latency) -> Latencies:
    """Return latencies of those, which need no reserve, as after parts of any length."""
    exact = Latencies(*latencies)
    exact.longest = 2**20
    exact.backward.known.add(0)
    exact.reserve.share = 0.0
    return exact
