"""Collectives that share a message, and the messages that a plan sends.

Consecutive collectives of a graph with the same kind and dtype share a message if none reads the
result of another. For example, the gathers of q's, k's and v's s = x Aᵀ are a single message, and
their readers run after the last of them. Messages of token shards are never shared, and may lie
between others that are shared.

`pcg.passes.graphs.collectives` makes a node of each such run. A plan's messages are known before
its graphs: its reshards in order are the forward's messages, and in reverse, where gradients flow,
the backward's.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass

from pcg.ir.graph import Graph
from pcg.ir.layouts import Layout
from pcg.ir.operators import operator
from pcg.ir.types import TensorType
from pcg.parallel.parallel_plan import NodePlan, ParallelPlan, Reshard

_COALESCED = ("all_gather", "all_reduce")


@dataclass(frozen=True, slots=True)
class Access:
    """The values that a node reads and computes, and its message.

    `key` is the kind and the dtype of the message; None if the node joins no message.
    """

    key: tuple[str, str] | None
    reads: tuple[object, ...]
    makes: tuple[object, ...]


def accesses_of(graph: Graph) -> list[Access]:
    """Return the accesses of a rank's graph, in the order of its nodes."""
    accesses = []
    for node in graph.nodes:
        is_shared = node.op in _COALESCED and not node.get("tokens")
        key = (node.op, graph.types[node.inputs[0]].dtype) if is_shared else None
        accesses.append(Access(key, node.inputs, tuple(value.name for value in node.outputs)))
    return accesses


def coalesced_runs(accesses: Sequence[Access]) -> list[list[int]]:
    """Return for each message the indices of the collectives that share it."""
    runs: list[list[int]] = []
    key: tuple[str, str] | None = None
    waiting: set[object] = set()
    for place, access in enumerate(accesses):
        waits = not waiting.isdisjoint(access.reads)
        if access.key is not None:
            if access.key != key or waits:
                key, waiting = access.key, set()
                runs.append([])
            runs[-1].append(place)
        if access.key is not None or waits:
            waiting.update(access.makes)
    return runs


@dataclass(frozen=True, slots=True)
class Message:
    """A message between the ranks.

    Attributes:
        kind: all_reduce, all_gather, reduce_scatter or all_to_all.
        types: types of its whole tensors; for token shards, with all ranks' rows, for an all_to_all
            with those that a rank sends.
    """

    kind: str
    types: tuple[TensorType, ...]


_Versions = tuple[tuple[str, Layout], ...]
"""Values, each in a layout."""


@dataclass(frozen=True, slots=True)
class _Event:
    """A node of a plan, or a reshard, with values in layouts.

    Attributes:
        active: the values of `reads` to which a gradient may flow back through the event.
        reshard: the reshard with its value's type; None for a node.
    """

    reads: _Versions
    makes: _Versions
    active: _Versions
    reshard: tuple[Reshard, TensorType] | None = None


_Sent = tuple[_Event, _Versions, _Versions]
"""An event in one direction, with the values that it reads and computes."""


def plan_messages(
    graph: Graph, plan: ParallelPlan, degree: int, active: Container[str]
) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """Return the messages of a plan's forward and backward, in order, with neighbours coalesced.

    A gradient may flow back to the `active` values; without a backward there are none.
    """
    events: list[_Event] = []
    for node in graph.nodes:
        node_plan = plan.nodes[node.name]
        events += _reshards(graph, node_plan, active)
        rule = node_plan.rule
        names = (value.name for value in node.outputs)
        reads = tuple(zip(node.inputs, rule.inputs, strict=True))
        makes = tuple(zip(names, rule.outputs, strict=True))
        constants = operator(rule.op or node.op).constant_in
        back = [read for i, read in enumerate(reads) if read[0] in active and i not in constants]
        events.append(_Event(reads, makes, tuple(back)))
    events += _reshards(graph, plan.outputs, active)
    forward = [(event, event.reads, event.makes) for event in events]
    backward = list(_backward(events, {*zip(graph.outputs, plan.outputs.rule.inputs, strict=True)}))
    return (
        _messages(forward, lambda reshard: reshard.forward, degree),
        _messages(backward, lambda reshard: reshard.backward, degree),
    )


def _reshards(graph: Graph, node_plan: NodePlan, active: Container[str]) -> Iterator[_Event]:
    for name, reshards in node_plan.reshards:
        for reshard in reshards:
            reads, makes = ((name, reshard.before),), ((name, reshard.after),)
            back = reads if name in active else ()
            yield _Event(reads, makes, back, (reshard, graph.types[name]))


def _backward(events: Sequence[_Event], reached: set[tuple[str, Layout]]) -> Iterator[_Sent]:
    for event in reversed(events):
        reads = tuple(value for value in event.makes if value in reached)
        if event.reshard and event.reshard[0].op == "regather" and event.active:
            # Its value is not saved, so backward gathers it with or without a gradient.
            yield event, (), ()
        elif reads and event.active:
            reached.update(event.active)
            yield event, reads, event.active


def _messages(
    sent: Sequence[_Sent], kind_of: Callable[[Reshard], str], degree: int
) -> tuple[Message, ...]:
    accesses, alone = [], []
    messages: dict[int, tuple[str, TensorType]] = {}
    for place, (event, reads, makes) in enumerate(sent):
        key = None
        if event.reshard and (kind := kind_of(event.reshard[0])):
            reshard, type_ = event.reshard
            messages[place] = (kind, reshard.message(type_, degree))
            if reshard.is_of_tokens(type_):
                alone.append([place])
            else:
                key = (kind, type_.dtype)
        accesses.append(Access(key, reads, makes))
    return tuple(
        Message(messages[run[0]][0], tuple(messages[place][1] for place in run))
        for run in sorted(coalesced_runs(accesses) + alone)
    )
