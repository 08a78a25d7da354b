"""What a parallel plan is made of: transitions, choices, what they cost, and what is given.

Source: FlexLLM (v1 §5.1, figure 6; v2 figure 3), for states and their transitions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache

from pcg.ir.layouts import PRE_REDUCE, REPLICATED, WHOLE, Layout, Sharding
from pcg.ir.types import TOKENS, State, TensorType, part_of_tokens


def kept(layout: Layout) -> Layout:
    """No layout, but the mark of a value in one that backward has: kept, or made again there."""
    return Layout(layout.state, 1 - layout.dim)


def is_saved(layout: Layout) -> bool:
    """Whether it is such a mark."""
    return layout.dim > 0


SAVED_COPY = kept(REPLICATED)
"""The mark of a copy."""


@dataclass(frozen=True, slots=True)
class Reshard:
    """A transition: the operator, and the layout that it gives.

    Between marks they are none of the graph's, but what backward does: `keep` gathers a copy again,
    and `again` makes what was made of it.
    """

    op: str
    before: Layout
    after: Layout

    @property
    def dim(self) -> int:
        """That is parted, before or after."""
        return min(self.before.dim, self.after.dim)

    @property
    def forward(self) -> str:
        """The collective of the forward; empty for none."""
        return _FORWARD.get(self.op, "")

    @property
    def backward(self) -> str:
        """The collective of the backward; empty for none."""
        return _BACKWARD.get(self.op, "")

    def is_of_tokens(self, type_: TensorType) -> bool:
        """Whether it parts the tokens of a tensor, or joins them."""
        return self.dim < 0 and type_.shape[self.dim] == TOKENS

    def message(self, type_: TensorType, degree: int) -> TensorType:
        """What its collective is of: the tensor, with rows for all of the ranks' equal parts."""
        if not self.is_of_tokens(type_):
            return type_
        return type_.with_shape((degree * part_of_tokens(degree), *type_.shape[1:]))


_FORWARD = {
    "combine": "all_gather",
    "gather": "all_gather",
    "reduce": "all_reduce",
    "scatter": "reduce_scatter",
}
_BACKWARD = {
    "gather": "reduce_scatter",
    "keep": "all_gather",
    "partition": "all_gather",
    "replicate": "all_reduce",
    "scatter": "all_gather",
}


@dataclass(frozen=True, slots=True)
class Cost:
    """What something costs.

    Attributes:
        cost: in the unit of the costs.
        forward_bytes: sent by a rank.
        backward_bytes: the same, backward.
        step_bytes: sent by a rank once an optimizer step, to sum gradients.
        forward_messages: that the forward's bytes are sent in.
        backward_messages: the same, backward.
    """

    cost: float = 0.0
    forward_bytes: int = 0
    backward_bytes: int = 0
    step_bytes: int = 0
    forward_messages: int = 0
    backward_messages: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.cost + other.cost,
            self.forward_bytes + other.forward_bytes,
            self.backward_bytes + other.backward_bytes,
            self.step_bytes + other.step_bytes,
            self.forward_messages + other.forward_messages,
            self.backward_messages + other.backward_messages,
        )

    def __sub__(self, other: Cost) -> Cost:
        return Cost(
            self.cost - other.cost,
            self.forward_bytes - other.forward_bytes,
            self.backward_bytes - other.backward_bytes,
            self.step_bytes - other.step_bytes,
            self.forward_messages - other.forward_messages,
            self.backward_messages - other.backward_messages,
        )


@dataclass(frozen=True, slots=True)
class NodePlan:
    """How ranks run one node.

    Attributes:
        rule: the way of its operator; of a graph's outputs the layouts in which they are taken.
        steps: transitions that it asks for, by value, in order.
        held: layouts in which adapters' weights are held that no node before has read.
        bill: of the node and the transitions.
    """

    rule: Sharding
    steps: tuple[tuple[str, tuple[Reshard, ...]], ...]
    held: tuple[tuple[str, Layout], ...]
    bill: Cost


@dataclass(frozen=True)
class ParallelPlan:
    """How ranks run a graph.

    Attributes:
        choices: of each node, by its name.
        outputs: transitions of the graph's outputs, as of a node.
        inputs: layouts of the graph's inputs; whole where not named.
        cost: the sum.
        widest: the most states that were weighed at one node.
    """

    choices: Mapping[str, NodePlan]
    outputs: NodePlan
    inputs: Mapping[str, Layout]
    cost: float
    widest: int

    @property
    def held(self) -> dict[str, Layout]:
        """Layouts of the adapters' weights."""
        return {name: layout for choice in self.choices.values() for name, layout in choice.held}

    def of(self, nodes: Iterable[str]) -> Cost:
        """What some nodes cost, with the transitions made for them."""
        return sum((self.choices[name].bill for name in nodes), Cost())

    @property
    def total(self) -> Cost:
        """What all nodes cost, and the outputs' transitions, each in a message of its own."""
        return self.of(self.choices) + self.outputs.bill


@dataclass(frozen=True)
class Constraints:
    """What a plan has to keep to.

    Attributes:
        layouts: of parameters by name. A frozen one that is not named takes what costs the least.
        rules: ways of nodes by name.
        inputs: layouts of the graph's inputs; whole where not named.
        outputs: layouts of its outputs, likewise.
        gathered: adapters' weights in parts that are gathered by all that read them.
        direct: adapters' weights that all read as they are held.
    """

    layouts: Mapping[str, Layout] = field(default_factory=dict)
    rules: Mapping[str, Sharding] = field(default_factory=dict)
    inputs: Mapping[str, Layout] = field(default_factory=dict)
    outputs: Mapping[str, Layout] = field(default_factory=dict)
    gathered: frozenset[str] = frozenset()
    direct: frozenset[str] = frozenset()


@cache
def transitions(
    layout: Layout, parts: tuple[Layout, ...], tokens: Layout | None = None
) -> tuple[Reshard, ...]:
    """The transitions from a layout.

    Args:
        layout: that a tensor has.
        parts: that it can be held in.
        tokens: of these, the parts of its tokens, where ranks may hold such.
    """
    found: list[tuple[str, Layout]]
    if layout == SAVED_COPY:
        found = [("again", kept(part)) for part in parts if part != tokens]
    elif is_saved(layout):
        found = [("again", kept(PRE_REDUCE))] if layout.state is State.PARTITIONED else []
    elif layout == WHOLE:
        found = [("replicate", REPLICATED), *(("partition", part) for part in parts)]
    elif layout == REPLICATED:
        found = [("take", part) for part in parts]
    elif layout == PRE_REDUCE:
        found = [("reduce", WHOLE)]
        if tokens is not None:
            found.append(("scatter", tokens))
    else:
        found = [("combine", WHOLE), ("place", PRE_REDUCE)]
        if layout == tokens:
            found += [("gather", REPLICATED), ("keep", SAVED_COPY)]
    return tuple(Reshard(op, layout, after) for op, after in found)
