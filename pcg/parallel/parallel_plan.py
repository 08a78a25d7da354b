"""The parts of a parallel plan: reshards, plans of nodes, their costs, and constraints.

Source: FlexLLM (v1 §5.1, figure 6; v2 figure 3), for layouts and the transitions between them.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field

from pcg.ir.layouts import REPLICATED, Layout, Sharding
from pcg.ir.operators.collectives import exchanged
from pcg.ir.types import TOKENS, TensorType, part_of_tokens


def saved(layout: Layout) -> Layout:
    """Return the mark for a layout in which backward has a value, saved or recomputed."""
    return layout._replace(dim=1 - layout.dim)


def is_saved(layout: Layout) -> bool:
    """Return whether a layout is a mark, which is no layout of the graph."""
    return layout.dim > 0


SAVED_COPY = saved(REPLICATED)
"""The mark of a copy."""


@dataclass(frozen=True, slots=True)
class Reshard:
    """A transition of a value between two layouts, by an operator.

    Between marks it is work of backward, not a node of the graph: `regather` gathers a copy again,
    and `recompute` repeats the node that computed the value. `choices` is the number of experts
    that a token chooses, of an all-to-all.
    """

    op: str
    before: Layout
    after: Layout
    choices: int = 0

    @property
    def dim(self) -> int:
        """The dim that is partitioned before or after; 0 for none."""
        return min(self.before.dim, self.after.dim)

    @property
    def forward(self) -> str:
        return _FORWARD.get(self.op, "")

    @property
    def backward(self) -> str:
        return _BACKWARD.get(self.op, "")

    def is_of_tokens(self, type_: TensorType) -> bool:
        return self.dim < 0 and type_.shape[self.dim] == TOKENS

    def message(self, type_: TensorType, degree: int) -> TensorType:
        """Return the type of the collective's tensor, with equal token rows for each rank.

        That of an all-to-all has the rows that a rank sends.
        """
        if self.choices:
            return exchanged(type_, self.choices, degree)
        if not self.is_of_tokens(type_):
            return type_
        return type_.with_shape((degree * part_of_tokens(degree), *type_.shape[1:]))


_FORWARD = {
    "collect": "all_to_all",
    "dispatch": "all_to_all",
    "combine": "all_gather",
    "gather": "all_gather",
    "reduce": "all_reduce",
    "scatter": "reduce_scatter",
}
_BACKWARD = {
    "collect": "all_to_all",
    "dispatch": "all_to_all",
    "gather": "reduce_scatter",
    "regather": "all_gather",
    "partition": "all_gather",
    "replicate": "all_reduce",
    "scatter": "all_gather",
}


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a layer on a rank, or of a part of it.

    Attributes:
        value: the number by which plans are compared: operations, or seconds.
        forward_bytes: bytes that a rank sends in the forward.
        backward_bytes: bytes that a rank sends in the backward.
        step_bytes: bytes that a rank sends once an optimizer step, to sum gradients.
    """

    value: float = 0.0
    forward_bytes: int = 0
    backward_bytes: int = 0
    step_bytes: int = 0
    forward_messages: int = 0
    backward_messages: int = 0

    def __sub__(self, other: Cost) -> Cost:
        numbers = operator.attrgetter(*Cost.__slots__)
        return Cost(*map(operator.sub, numbers(self), numbers(other)))


@dataclass(frozen=True, slots=True)
class NodePlan:
    """The execution of a node on ranks, or the final layouts of a graph's outputs.

    Attributes:
        rule: the sharding of its operator; of outputs, their final layouts.
        reshards: transitions of its inputs, by value, in order.
        held: layouts of the adapters' weights that no earlier node has read.
        cost: the cost of the node and the transitions, without coalescing of messages.
        step_bytes: bytes that a rank sends once an optimizer step, to sum gradients.
    """

    rule: Sharding
    reshards: tuple[tuple[str, tuple[Reshard, ...]], ...]
    held: tuple[tuple[str, Layout], ...]
    cost: float
    step_bytes: int


@dataclass(frozen=True)
class ParallelPlan:
    """The plans of a graph's nodes by name, and of its outputs; inputs without a plan are whole."""

    nodes: Mapping[str, NodePlan]
    outputs: NodePlan
    inputs: Mapping[str, Layout]

    @property
    def held(self) -> dict[str, Layout]:
        return {name: layout for node in self.nodes.values() for name, layout in node.held}

    @property
    def rules(self) -> dict[str, Sharding]:
        return {name: node.rule for name, node in self.nodes.items()}

    @property
    def cost(self) -> float:
        """The cost of all nodes and of the outputs' transitions, without coalescing of messages."""
        return sum(node.cost for node in self.nodes.values()) + self.outputs.cost


@dataclass(frozen=True)
class Constraints:
    """Layouts and rules that a plan must respect.

    Attributes:
        layouts: layouts of parameters by name. A frozen parameter without a layout takes the
            cheapest.
        rules: rules of nodes by name.
        inputs: layouts of the graph's inputs; whole by default.
        outputs: layouts of the graph's outputs; whole by default.
        gathered: sharded adapters' weights that all their readers gather.
        direct: adapters' weights that all their readers take in the layout in which ranks hold
            them.
    """

    layouts: Mapping[str, Layout] = field(default_factory=dict)
    rules: Mapping[str, Sharding] = field(default_factory=dict)
    inputs: Mapping[str, Layout] = field(default_factory=dict)
    outputs: Mapping[str, Layout] = field(default_factory=dict)
    gathered: frozenset[str] = frozenset()
    direct: frozenset[str] = frozenset()
