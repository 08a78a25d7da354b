"""Run passes in order: each is timed, and what one made is verified: graphs, and interfaces."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, cast

from pcg.errors import BrokenGraphError, IrError, PassError, PcgError
from pcg.ir.analysis.verifier import verify
from pcg.ir.graph import Graph
from pcg.ir.printer import print_graphs
from pcg.passes.pass_base import Pass

Before = TypeVar("Before")
After = TypeVar("After")
Middle = TypeVar("Middle")

Named: TypeAlias = Mapping[str, Graph]
"""Graphs by what they are for and their own name, as `training.block_0_backward`."""


class State(Protocol):
    """The state of a compilation between two passes."""

    @property
    def graphs(self) -> Named: ...

    def check(self) -> None:
        """Check the interfaces between the graphs. TypeCheckError: two do not fit; names both."""


@dataclass(frozen=True)
class PassRecord:
    """The record of one pass that ran: its time, verification included, and the graphs behind it.

    Users know the state after it by `labels`: its own name, unless it is that of a stage that goes
    on, and those of the stages that end with it.
    """

    name: str
    labels: tuple[str, ...]
    seconds: float
    graphs: Named

    @property
    def nodes(self) -> int:
        return sum(len(graph.nodes) for graph in self.graphs.values())

    def text(self) -> str:
        return text_of(self.graphs)


Observer: TypeAlias = Callable[[PassRecord], None]
"""A function that is told of each pass as it ends."""


def text_of(graphs: Named) -> str:
    """Graphs as text IR, each under its full name, as `training.block_0_backward`."""
    return print_graphs(graph.replace(name=name) for name, graph in graphs.items())


@dataclass(frozen=True)
class Stage(Generic[Before, After]):
    """Passes, and stages, that lead from one state of a compilation to another, in order."""

    name: str
    passes: tuple[Pass[Any, Any] | Stage[Any, Any], ...]

    def flat(
        self, within: tuple[str, ...] = (), ends: tuple[str, ...] = ()
    ) -> Iterator[tuple[Pass[Any, Any], tuple[str, ...]]]:
        """The passes in order, each with the names by which users know the state after it.

        `within` names the stages around this one, `ends` those of them that end with it.
        """
        within = (*within, self.name)
        for number, one in enumerate(self.passes, 1):
            ended = (*ends, self.name) if number == len(self.passes) else ()
            if isinstance(one, Stage):
                yield from one.flat(within, ended)
            else:
                own = () if one.name in within else (one.name,)
                yield one, (*own, *ended)

    def until(self, kind: type[Pass[Middle, Any]]) -> Stage[Before, Middle]:
        """The passes before the first of a class."""
        flat = [one for one, _ in self.flat()]
        stop = next(i for i, one in enumerate(flat) if isinstance(one, kind))
        return Stage(self.name, tuple(flat[:stop]))

    def run(self, before: Before, observe: Observer | None = None) -> After:
        """The state after the stage.

        Raises:
            PassError: a pass failed; it names the pass, and carries the graphs that it was given.
            BrokenGraphError: a pass made a graph that breaks a rule of the IR, or two that do not
                fit; likewise.
            PcgError: what a pass refuses.
        """
        state: Any = before
        for one, labels in self.flat():
            state = run_pass(one, state, labels, observe)
        return cast("After", state)


def run_pass(
    one: Pass[Any, Any], before: Any, labels: tuple[str, ...] = (), observe: Observer | None = None
) -> Any:
    """The state after one pass, verified; the arguments and errors are those of `Stage.run`."""
    started = time.perf_counter()
    given: Named = getattr(before, "graphs", {})
    try:
        after: State = one.run(before)
    except IrError as error:
        message = f"pass {one.name!r} cannot build a graph: {error}"
        raise BrokenGraphError(message, text_of(given)) from error
    except PcgError:
        raise
    except Exception as error:
        message = f"pass {one.name!r} failed: {type(error).__name__}: {error}"
        raise PassError(message, text_of(given)) from error
    known = {id(graph) for graph in given.values()}
    for name, graph in after.graphs.items():
        if id(graph) not in known:
            _verify(one, name, graph, given)
    try:
        after.check()
    except IrError as error:
        message = f"pass {one.name!r} made graphs that do not fit: {error}"
        raise BrokenGraphError(message, text_of(given)) from error
    if observe is not None:
        observe(PassRecord(one.name, labels, time.perf_counter() - started, after.graphs))
    return after


def _verify(one: Pass[Any, Any], name: str, graph: Graph, given: Named) -> None:
    try:
        verify(graph)
    except IrError as error:
        before = {name: given[name]} if name in given else given
        message = f"pass {one.name!r} made a wrong graph {name}: {error}"
        raise BrokenGraphError(message, text_of(before)) from error


def dump_to(directory: str | Path) -> Observer:
    """An observer that writes each pass's text IR to `<n>-<pass>.pcg` in a directory."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    numbers = itertools.count()

    def observe(record: PassRecord) -> None:
        path = folder / f"{next(numbers):02}-{record.name}.pcg"
        path.write_text(record.text(), encoding="utf-8")

    return observe
