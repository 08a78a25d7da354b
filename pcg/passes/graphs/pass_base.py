"""Passes and stages: named objects that build a new graph, run in order, timed and verified.

A pass is a frozen dataclass; its fields are its options, and `name` is its name for users. A pass
never modifies its input. Most passes map one of four kinds of input to the same kind:

    GraphPass       any graph
    ModelPass       the prologue, blocks and epilogue of a model
    GradientPass    a graph and its backward, before the choice of saved values
    LayerPass       a layer's forward and backward, after that choice

Other passes convert a stage of the pipeline to the next (`pcg.passes.stages`).
"""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeAlias, TypeVar, cast

from pcg.errors import BrokenGraphError, IrError, PassError, PcgError
from pcg.ir.analysis.verifier import verify
from pcg.ir.graph import Graph
from pcg.ir.printer import print_graphs
from pcg.ir.program.program import ModelGraph, TrainingGraph

Before = TypeVar("Before")
After = TypeVar("After")
Whole = TypeVar("Whole")


@dataclass(frozen=True)
class Pass(ABC, Generic[Before, After]):
    """A step of a compilation."""

    name: ClassVar[str]

    @abstractmethod
    def run(self, before: Before) -> After:
        """Return the result; `before` itself if nothing changes."""


class GraphPass(Pass[Graph, Graph]):
    """A pass over a graph."""


class ModelPass(Pass[ModelGraph, ModelGraph]):
    """A pass over the graphs of a model."""


class LayerPass(Pass[TrainingGraph, TrainingGraph]):
    """A pass over a layer's forward and backward."""


@dataclass(frozen=True)
class On(Pass[Any, Any]):
    """A pass over parts of a stage, such as `serving.prologue training.plan.plans`.

    A path names fields; it descends into tuples and stops at None. A pass over a graph runs over
    each graph of a model.
    """

    paths: str
    inner: Pass[Any, Any]

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.inner.name

    def run(self, before: Any) -> Any:
        return with_parts(before, self.paths, self._run)

    def _run(self, part: Any) -> Any:
        if isinstance(part, ModelGraph) and isinstance(self.inner, GraphPass):
            return part.map(self.inner.run)
        return self.inner.run(part)


def with_parts(whole: Whole, paths: str, change: Callable[[Any], Any]) -> Whole:
    """Change the parts of a value at some paths; see `On`."""

    def changed(value: Any, fields: Sequence[str]) -> Any:
        if value is None:
            return None
        if isinstance(value, tuple):
            return tuple(changed(each, fields) for each in value)
        if not fields:
            return change(value)
        name, *rest = fields
        return replace(value, **{name: changed(getattr(value, name), rest)})

    for path in paths.split():
        whole = changed(whole, path.split("."))
    return whole


# -------------------------------------------------------------------------------------------- stage


Middle = TypeVar("Middle")

Named: TypeAlias = Mapping[str, Graph]
"""Graphs by purpose and name, such as `training.block_0_backward`."""


class State(Protocol):
    """The state of a compilation between two passes."""

    @property
    def graphs(self) -> Named: ...

    def check(self) -> None:
        """Check the interfaces between the graphs; raise TypeCheckError with both names."""


@dataclass(frozen=True)
class PassRecord:
    """Record of a pass: its time, including verification, and the resulting graphs.

    `labels` are the names of the resulting state: the pass's name, unless a stage of the same name
    continues, and the names of the stages that end with the pass.
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
"""Function that receives the record of each finished pass."""


def text_of(graphs: Named) -> str:
    """Print graphs as text IR with full names, such as `training.block_0_backward`."""
    return print_graphs(graph.replace(name=name) for name, graph in graphs.items())


@dataclass(frozen=True)
class Stage(Generic[Before, After]):
    """A sequence of passes and stages between two states of a compilation."""

    name: str
    passes: tuple[Pass[Any, Any] | Stage[Any, Any], ...]

    def flat(
        self, within: tuple[str, ...] = (), ends: tuple[str, ...] = ()
    ) -> Iterator[tuple[Pass[Any, Any], tuple[str, ...]]]:
        """Yield the passes in order, each with the names of the state after it.

        `within` names the enclosing stages, `ends` those that end with this stage.
        """
        within = (*within, self.name)
        for number, item in enumerate(self.passes, 1):
            ended = (*ends, self.name) if number == len(self.passes) else ()
            if isinstance(item, Stage):
                yield from item.flat(within, ended)
            else:
                label = () if item.name in within else (item.name,)
                yield item, (*label, *ended)

    def until(self, kind: type[Pass[Middle, Any]]) -> Stage[Before, Middle]:
        flat = [item for item, _ in self.flat()]
        stop = next(i for i, item in enumerate(flat) if isinstance(item, kind))
        return Stage(self.name, tuple(flat[:stop]))

    def run(self, before: Before, observe: Observer | None = None) -> After:
        """Run the passes.

        Raises:
            PassError: a pass failed; names the pass, and carries the graphs before it.
            BrokenGraphError: a pass built an invalid graph, or graphs that do not match.
            PcgError: a pass refuses the model.
        """
        state: Any = before
        for step, labels in self.flat():
            state = run_pass(step, state, labels, observe)
        return cast("After", state)


def run_pass(
    step: Pass[Any, Any], before: Any, labels: tuple[str, ...] = (), observe: Observer | None = None
) -> Any:
    """Run and verify a pass; see `Stage.run` for arguments and errors."""
    started = time.perf_counter()
    graphs: Named = getattr(before, "graphs", {})
    try:
        after: State = step.run(before)
    except IrError as error:
        message = f"pass {step.name!r} cannot build a graph: {error}"
        raise BrokenGraphError(message, text_of(graphs)) from error
    except PcgError:
        raise
    except Exception as error:
        message = f"pass {step.name!r} failed: {type(error).__name__}: {error}"
        raise PassError(message, text_of(graphs)) from error
    known = {id(graph) for graph in graphs.values()}
    for name, graph in after.graphs.items():
        if id(graph) not in known:
            _verify(step, name, graph, graphs)
    try:
        after.check()
    except IrError as error:
        message = f"pass {step.name!r} made graphs that do not fit: {error}"
        raise BrokenGraphError(message, text_of(graphs)) from error
    if observe is not None:
        observe(PassRecord(step.name, labels, time.perf_counter() - started, after.graphs))
    return after


def _verify(step: Pass[Any, Any], name: str, graph: Graph, graphs: Named) -> None:
    try:
        verify(graph)
    except IrError as error:
        before = {name: graphs[name]} if name in graphs else graphs
        message = f"pass {step.name!r} made a wrong graph {name}: {error}"
        raise BrokenGraphError(message, text_of(before)) from error


def dump_to(directory: str | Path) -> Observer:
    """Return an observer that writes each pass's text IR to `<n>-<pass>.pcg` in a directory."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    numbers = itertools.count()

    def observe(record: PassRecord) -> None:
        path = folder / f"{next(numbers):02}-{record.name}.pcg"
        path.write_text(record.text(), encoding="utf-8")

    return observe


# ------------------------------------------------------------------------------------------- naming


_NAMED_BY_MODULE = {"embedding", "layer_norm", "linear", "rms_norm"}


def readable_names(graph: Graph, inputs: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return a new name for each node's outputs, and for the inputs in `inputs`.

    `q_proj` for the linear operator of module `self_attn.q_proj`, `add_1` for the second addition.
    """
    names = {v.name: (inputs or {}).get(v.name, v.name) for v in graph.inputs}
    taken = {*names.values(), *graph.parameters_by_name}

    def unique(stem: str) -> str:
        name = unused_name(stem, taken)
        taken.add(name)
        return name

    for node in graph.nodes:
        last = node.scope.rsplit(".", 1)[-1]
        stem = last if node.op in _NAMED_BY_MODULE and last and not last.isdigit() else node.op
        base = unique(stem)
        names[node.outputs[0].name] = base
        for value in node.outputs[1:]:
            suffix = value.name.removeprefix(node.outputs[0].name + "_")
            names[value.name] = unique(f"{base}_{suffix}")
    return names


def unused_name(stem: str, taken: Container[str]) -> str:
    """Return the stem, or the first of `stem_1`, `stem_2`, … that is not taken."""
    if stem not in taken:
        return stem
    return next(name for n in count(1) if (name := f"{stem}_{n}") not in taken)
