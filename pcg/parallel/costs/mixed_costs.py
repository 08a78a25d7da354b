"""Costs of a layer over steps of several sizes, for the one program that serves all of them.

The same layouts and graphs decode a token of each sequence and read prompts. What is cheapest for
thousands of tokens of a prompt, such as one more sum over the ranks in place of a product, may cost
a third of a decode step. So a plan that serves is made for a mix of steps:

    cost = Σ over steps   seconds of the plan there / seconds of the base alone there

Each step's part is a share of its own time, so that none outweighs the others by its size.
"""

from __future__ import annotations

from collections.abc import Sequence

from pcg.ir.graph import Graph, Node
from pcg.ir.layouts import Sharding
from pcg.ir.types import TensorType
from pcg.parallel.costs.layer_costs import DeviceCosts, LayerCosts

DECODE_TOKENS = (1, 4, 16, 64, 256)
"""Tokens of the steps that decode: one of each sequence."""
PREFILL_TOKENS = 2048
"""Tokens of the step that reads prompts."""
SERVING_TOKENS = (*DECODE_TOKENS, PREFILL_TOKENS)
SERVED_CONTEXT = 1024
"""Tokens that each of them attends to."""


class MixedCosts(LayerCosts):
    """Costs of a layer's forward as a sum over steps, each weighed.

    Bytes are those of the first step.

    Args:
        steps: the costs of each step, with its weight.
    """

    def __init__(self, steps: Sequence[tuple[float, DeviceCosts]]) -> None:
        first = steps[0][1]
        super().__init__(first.degree, first.tokens)
        self._steps = steps

    def node(self, node: Node, graph: Graph, rule: Sharding, needs: tuple[bool, ...]) -> float:
        return sum(weight * step.node(node, graph, rule, needs) for weight, step in self._steps)

    def send(self, kind: str, *types: TensorType) -> float:
        return sum(weight * step.send(kind, *types) for weight, step in self._steps)

    def place(self, type_: TensorType, dim: int) -> float:
        return sum(weight * step.place(type_, dim) for weight, step in self._steps)
