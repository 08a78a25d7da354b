"""A pass: a named object that makes a new graph of a graph, and changes nothing in place.

A pass is a frozen dataclass. Its class has the name that users know it by, and its fields are its
options. There are four kinds, by what they need to see:

    GraphPass       any graph
    ModelPass       prologue, blocks and epilogue together
    GradientPass    a graph and its backward, before it is decided what forward saves
    LayerPass       a layer's forward and backward, after that
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from pcg.ir.graph import Graph


@dataclass(frozen=True)
class GraphPass(ABC):
    """A pass over one graph."""

    name: ClassVar[str]

    @abstractmethod
    def run(self, graph: Graph) -> Graph:
        """The new graph; `graph` itself where nothing changes."""
