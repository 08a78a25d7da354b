"""Which collectives are one message, and what a plan's messages are.

In the order of a graph, collectives of one kind and dtype that follow each other, with no other
between them, go together as long as none reads what came of another of them. So the gathers of q's,
k's and v's s = x Aᵀ are one message, and what waits for it runs behind the last of them.

Messages of parts of the tokens go by themselves, and what stands between others may be such.

`pcg.passes.sharding.coalesce_collectives` makes one node of each such run. What a plan's graphs
will send is known before they are made: its transitions in order are those of the forward, and
backward, where gradients flow by, the same in reverse.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

from pcg.ir.graph import Graph
from pcg.ir.layouts import Layout
from pcg.ir.operators import operator
from pcg.ir.types import TensorType
from pcg.parallel.parallel_plan import NodePlan, ParallelPlan

COLLECTIVES = ("all_gather", "all_reduce")

Key = tuple[str, str]
"""Kind and dtype of a message."""


@dataclass(frozen=True, slots=True)
class Move:
    """What one node does.

    Attributes:
        key: of the message that it sends; None for none.
        reads: values.
        makes: values.
    """

    key: Key | None
    reads: tuple[object, ...]
    makes: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Message:
    """What the ranks say to each other at one time.

    Attributes:
        kind: all_reduce, all_gather or reduce_scatter.
        types: of the tensors that it is of, whole; of parts of the tokens with all ranks' rows.
    """

    kind: str
    types: tuple[TensorType, ...]


@dataclass(frozen=True, slots=True)
class Messages:
    """Of a plan, in order."""

    forward: tuple[Message, ...]
    backward: tuple[Message, ...]


def runs(moves: Sequence[Move]) -> list[list[int]]:
    """The places of the collectives that are one message, for each message."""
    found: list[list[int]] = []
    key: Key | None = None
    waiting: set[object] = set()
    for place, move in enumerate(moves):
        waits = not waiting.isdisjoint(move.reads)
        if move.key is not None:
            if move.key != key or waits:
                key, waiting = move.key, set()
                found.append([])
            found[-1].append(place)
        if move.key is not None or waits:
            waiting.update(move.makes)
    return found


def moves_of(graph: Graph) -> list[Move]:
    """What the nodes of a rank's graph do."""
    return [
        Move(
            (node.op, graph.types[node.inputs[0]].dtype)
            if node.op in COLLECTIVES and not node.get("tokens")
            else None,
            node.inputs,
            tuple(value.name for value in node.outputs),
        )
        for node in graph.nodes
    ]


@dataclass(frozen=True, slots=True)
class _Planned:
    """A node of a plan, or a transition.

    Attributes:
        reads: values, each in a layout.
        makes: likewise.
        active: of what it reads, what a gradient may flow back to by it.
        forward: kind of the message that it sends; empty for none.
        backward: the same, backward.
        type: of the whole that is sent.
        of_tokens: whether that is parts of the tokens.
        again: whether backward sends whatever gradients it has, as what it reads was not kept.
    """

    reads: tuple[tuple[str, Layout], ...]
    makes: tuple[tuple[str, Layout], ...]
    active: tuple[tuple[str, Layout], ...]
    forward: str = ""
    backward: str = ""
    type: TensorType | None = None
    of_tokens: bool = False
    again: bool = False


@dataclass(frozen=True, slots=True)
class _Sent:
    """What is planned, one way.

    Attributes:
        planned: a node or a transition.
        kind: of the message that it sends; empty for none.
        reads: values, each in a layout.
        makes: likewise.
    """

    planned: _Planned
    kind: str
    reads: tuple[tuple[str, Layout], ...]
    makes: tuple[tuple[str, Layout], ...]

    @property
    def move(self) -> Move:
        type_ = self.planned.type
        key = None
        if self.kind and type_ is not None and not self.planned.of_tokens:
            key = (self.kind, type_.dtype)
        return Move(key, self.reads, self.makes)


def messages(graph: Graph, plan: ParallelPlan, degree: int, active: Container[str]) -> Messages:
    """What the ranks send for a graph by a plan, once it is that of one rank and joined.

    Args:
        graph: of whole tensors.
        plan: of it.
        degree: number of ranks.
        active: its values that a gradient may flow back to; none without a backward.
    """
    planned: list[_Planned] = []
    for node in graph.nodes:
        choice = plan.choices[node.name]
        planned += _transitions(graph, choice, degree, active)
        names = (value.name for value in node.outputs)
        reads = tuple(zip(node.inputs, choice.rule.inputs, strict=True))
        makes = tuple(zip(names, choice.rule.outputs, strict=True))
        constants = operator(choice.rule.op or node.op).constant_in
        back = [read for i, read in enumerate(reads) if read[0] in active and i not in constants]
        planned.append(_Planned(reads, makes, tuple(back)))
    planned += _transitions(graph, plan.outputs, degree, active)
    ends = set(zip(graph.outputs, plan.outputs.rule.inputs, strict=True))
    return Messages(_forward(planned), _backward(planned, ends))


def _transitions(
    graph: Graph, choice: NodePlan, degree: int, active: Container[str]
) -> Iterator[_Planned]:
    for name, steps in choice.steps:
        for step in steps:
            reads, makes = ((name, step.before),), ((name, step.after),)
            back = reads if name in active else ()
            type_ = graph.types[name]
            yield _Planned(
                reads,
                makes,
                back,
                step.forward,
                step.backward,
                step.message(type_, degree),
                step.is_of_tokens(type_),
                step.op == "keep",
            )


def _forward(planned: Sequence[_Planned]) -> tuple[Message, ...]:
    sends = [_Sent(one, one.forward, one.reads, one.makes) for one in planned]
    return _messages(sends)


def _backward(planned: Sequence[_Planned], ends: set[tuple[str, Layout]]) -> tuple[Message, ...]:
    sends = []
    reached = set(ends)
    for one in reversed(planned):
        reads = tuple(made for made in one.makes if made in reached)
        if one.again and one.active:
            sends.append(_Sent(one, one.backward, (), ()))
        elif reads and one.active:
            reached.update(one.active)
            sends.append(_Sent(one, one.backward, reads, one.active))
    return _messages(sends)


def _messages(sends: Sequence[_Sent]) -> tuple[Message, ...]:
    found = [(run[0], run) for run in runs([sent.move for sent in sends])]
    found += [(at, [at]) for at, sent in enumerate(sends) if sent.kind and sent.planned.of_tokens]
    return tuple(
        Message(
            sends[first].kind,
            tuple(type_ for at in run if (type_ := sends[at].planned.type) is not None),
        )
        for first, run in sorted(found)
    )
