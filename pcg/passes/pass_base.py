"""A pass: a named object that makes something new of a graph, and changes nothing in place.

A pass is a frozen dataclass. Its class has the name that users know it by, and its fields are its
options. Most passes take one of four things and give the same:

    GraphPass       any graph
    ModelPass       the prologue, blocks and epilogue of a model together
    GradientPass    a graph and its backward, before it is decided what forward saves
    LayerPass       a layer's forward and backward, after that

The others lead from one stage of the pipeline to the next (`pcg.passes.stages`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from pcg.ir.graph import Graph
from pcg.ir.program.program import ModelGraph, TrainingGraph

Before = TypeVar("Before")
After = TypeVar("After")
Part = TypeVar("Part")
Whole = TypeVar("Whole")


@dataclass(frozen=True)
class Pass(ABC, Generic[Before, After]):
    """One step of a compilation."""

    name: ClassVar[str]

    @abstractmethod
    def run(self, before: Before) -> After:
        """The result; `before` itself where nothing changes."""


class GraphPass(Pass[Graph, Graph]):
    """A pass over one graph."""


class ModelPass(Pass[ModelGraph, ModelGraph]):
    """A pass over the graphs of a model."""


class LayerPass(Pass[TrainingGraph, TrainingGraph]):
    """A pass over a layer's forward and backward."""


@dataclass(frozen=True)
class On(Pass[Whole, Whole], Generic[Whole, Part]):
    """A pass over some parts of a stage; a method of the stage, the lens, has these changed."""

    lens: Callable[[Whole, Callable[[Part], Part]], Whole]
    inner: Pass[Part, Part]

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.inner.name

    def run(self, before: Whole) -> Whole:
        return self.lens(before, self.inner.run)
