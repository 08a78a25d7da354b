"""Builds the plan of a node: the layouts of the weights that it reads first, and its reshards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pcg.ir.layouts import REPLICATED, Layout, Sharding
from pcg.ir.types import TensorType
from pcg.parallel.costs.layer_costs import LayerCosts
from pcg.parallel.parallel_plan import Cost, NodePlan, Reshard


@dataclass
class NodePlanBuilder:
    """Adds up the cost, and the number, of the reshards that bring a node's inputs into layouts.

    `held` are the layouts of adapters' weights that no earlier node has read.
    """

    costs: LayerCosts
    cost: Cost = field(default_factory=Cost)
    count: int = 0
    reshards: list[tuple[str, tuple[Reshard, ...]]] = field(default_factory=list)
    held: list[tuple[str, Layout]] = field(default_factory=list)

    def hold(self, name: str, layout: Layout, type_: TensorType, is_active: bool) -> None:
        """Hold an adapter's weight in a layout."""
        self.held.append((name, layout))
        if layout == REPLICATED and is_active:
            size = self.costs.bytes_sent("all_reduce", type_)
            self.cost += Cost(self.costs.sum_gradient(type_), step_bytes=size)

    def reshard(
        self, name: str, value: float, messages: Sequence[tuple[Reshard, TensorType]], active: bool
    ) -> None:
        """Bring a value along a path of reshards, each with its message, at a known cost."""
        self.count += len(messages)
        self.reshards.append((name, tuple(one for one, _ in messages)))
        self.cost += Cost(value)
        for one, message in messages:
            if one.forward:
                size = self.costs.bytes_sent(one.forward, message)
                self.cost += Cost(forward_bytes=size, forward_messages=1)
            if one.backward and active:
                size = self.costs.bytes_sent(one.backward, message)
                self.cost += Cost(backward_bytes=size, backward_messages=1)

    def build(self, rule: Sharding, work: float) -> NodePlan:
        """The plan of a node that runs by a rule, with the cost of its own work."""
        return NodePlan(rule, tuple(self.reshards), tuple(self.held), Cost(work) + self.cost)
