"""Make the choice of a node: what bringing its inputs into the layouts of a way takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pcg.ir.layouts import REPLICATED, Layout, Sharding
from pcg.ir.types import TensorType
from pcg.parallel.costs.layer_costs import LayerCosts
from pcg.parallel.parallel_plan import Cost, NodePlan, Reshard


@dataclass
class NodePlanBuilder:
    """Adds up what bringing a node's inputs takes."""

    cost: float = 0.0
    count: int = 0
    steps: list[tuple[str, tuple[Reshard, ...]]] = field(default_factory=list)
    held: list[tuple[str, Layout]] = field(default_factory=list)
    forward_bytes: int = 0
    backward_bytes: int = 0
    step_bytes: int = 0
    forward_messages: int = 0
    backward_messages: int = 0

    def hold(
        self, name: str, layout: Layout, type_: TensorType, is_active: bool, costs: LayerCosts
    ) -> None:
        self.held.append((name, layout))
        if layout == REPLICATED and is_active:
            self.cost += costs.sum_gradient(type_)
            self.step_bytes += costs.bytes_sent("all_reduce", type_)

    def bring(
        self,
        name: str,
        cost: float,
        messages: Sequence[tuple[Reshard, TensorType]],
        is_active: bool,
        costs: LayerCosts,
    ) -> None:
        self.cost += cost
        self.count += len(messages)
        self.steps.append((name, tuple(step for step, _ in messages)))
        for step, message in messages:
            if step.forward:
                self.forward_bytes += costs.bytes_sent(step.forward, message)
                self.forward_messages += 1
            if step.backward and is_active:
                self.backward_bytes += costs.bytes_sent(step.backward, message)
                self.backward_messages += 1

    def __call__(self, rule: Sharding, work: float) -> NodePlan:
        bill = Cost(
            work + self.cost,
            self.forward_bytes,
            self.backward_bytes,
            self.step_bytes,
            self.forward_messages,
            self.backward_messages,
        )
        return NodePlan(rule, tuple(self.steps), tuple(self.held), bill)
