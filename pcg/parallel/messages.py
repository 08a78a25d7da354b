"""Which collectives are one message, and what a plan's messages are.

In the order of a graph, collectives of one kind and dtype that follow each other, with no other
between them, go together as long as none reads what came of another of them. So the gathers of q's,
k's and v's s = x Aᵀ are one message, and what waits for it runs behind the last of them.

`pcg.passes.join` makes one node of each such run. What a plan's graphs will send is known before
they are made: its transitions in order are those of the forward, and backward, where gradients flow
by, the same in reverse.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

from pcg.ir.graph import Graph
from pcg.ir.layouts import WHOLE, Layout
from pcg.ir.operators import operator
from pcg.ir.types import TensorType
from pcg.parallel.parallel_plan import Choice, Plan

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
        kind: all_reduce or all_gather.
        types: of the tensors that it is of, whole.
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
            (node.op, graph.types[node.inputs[0]].dtype) if node.op in COLLECTIVES else None,
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
    """

    reads: tuple[tuple[str, Layout], ...]
    makes: tuple[tuple[str, Layout], ...]
    active: tuple[tuple[str, Layout], ...]
    forward: str = ""
    backward: str = ""
    type: TensorType | None = None


def messages(graph: Graph, plan: Plan, active: Container[str]) -> Messages:
    """What the ranks send for a graph by a plan, once it is that of one rank and joined.

    Args:
        graph: of whole tensors.
        plan: of it.
        active: its values that a gradient may flow back to; none without a backward.
    """
    planned: list[_Planned] = []
    for node in graph.nodes:
        choice = plan.choices[node.name]
        planned += _transitions(graph, choice, active)
        names = (value.name for value in node.outputs)
        reads = tuple(zip(node.inputs, choice.rule.inputs, strict=True))
        makes = tuple(zip(names, choice.rule.outputs, strict=True))
        constants = operator(choice.rule.op or node.op).constant_in
        back = [read for i, read in enumerate(reads) if read[0] in active and i not in constants]
        planned.append(_Planned(reads, makes, tuple(back)))
    planned += _transitions(graph, plan.outputs, active)
    ends = {(name, WHOLE) for name in graph.outputs}
    return Messages(_forward(planned), _backward(planned, ends))


def _transitions(graph: Graph, choice: Choice, active: Container[str]) -> Iterator[_Planned]:
    for name, steps in choice.steps:
        for step in steps:
            reads, makes = ((name, step.before),), ((name, step.after),)
            back = reads if name in active else ()
            type_ = graph.types[name]
            yield _Planned(reads, makes, back, step.forward, step.backward, type_)


def _forward(planned: Sequence[_Planned]) -> tuple[Message, ...]:
    moves = [Move(_key(one.forward, one.type), one.reads, one.makes) for one in planned]
    types = [one.type for one in planned]
    return _messages(moves, types)


def _backward(planned: Sequence[_Planned], ends: set[tuple[str, Layout]]) -> tuple[Message, ...]:
    moves, types = [], []
    reached = set(ends)
    for one in reversed(planned):
        reads = tuple(made for made in one.makes if made in reached)
        if reads and one.active:
            reached.update(one.active)
            moves.append(Move(_key(one.backward, one.type), reads, one.active))
            types.append(one.type)
    return _messages(moves, types)


def _messages(moves: Sequence[Move], types: Sequence[TensorType | None]) -> tuple[Message, ...]:
    found = []
    for run in runs(moves):
        key = moves[run[0]].key
        sent = tuple(type_ for place in run if (type_ := types[place]) is not None)
        if key is not None:
            found.append(Message(key[0], sent))
    return tuple(found)


def _key(kind: str, type_: TensorType | None) -> Key | None:
    return (kind, type_.dtype) if kind and type_ is not None else None
