"""Rewriting: replace a node by another form of it, wherever a rule finds one.

A rule looks at the old graph from a root node down, and adds the replacement to the new one; the
nodes that it made superfluous die. Rules see the old graph only, so their order matters where two
match one root: the first wins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from pcg.ir.analysis.builder import Builder
from pcg.ir.graph import Attribute, Graph, Node


class NewName(str):
    """The name of a value of the new graph, where names of the old one are expected too."""

    __slots__ = ()


class Rewriter:
    """The old graph as a rule sees it, and the new one under construction."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.builder = Builder.extending(graph.replace(nodes=()))
        self.new_names: dict[str, NewName] = {}
        self._scope = ""

    def producer(self, name: str, *ops: str) -> Node | None:
        """The node that makes a value, if its operator is one of `ops`."""
        node = self.graph.producers.get(name)
        return node if node is not None and node.op in ops else None

    def is_read_once(self, name: str) -> bool:
        return len(self.graph.consumers.get(name, ())) == 1 and name not in self.graph.outputs

    def through(self, name: str, *ops: str) -> str:
        """The value behind a chain of these one-input operators."""
        while (node := self.producer(name, *ops)) is not None:
            name = node.inputs[0]
        return name

    def is_parameter(self, name: str) -> bool:
        return name in self.graph.parameters_by_name

    def add(self, op: str, *inputs: str, scope: str = "", **attributes: Attribute) -> NewName:
        """Add a node over values of the old graph (or of the new one)."""
        return self.add_many(op, *inputs, scope=scope, **attributes)[0]

    def add_many(
        self, op: str, *inputs: str, scope: str = "", **attributes: Attribute
    ) -> tuple[NewName, ...]:
        """Add a node of several outputs; its scope is the root's by default."""
        names = [str(self.new(name)) for name in inputs]
        added = self.builder.add_many(op, names, name=op, scope=scope or self._scope, **attributes)
        return tuple(map(NewName, added))

    def new(self, name: str) -> NewName:
        """The new graph's name for a value of either graph."""
        return name if isinstance(name, NewName) else self.new_names.get(name, NewName(name))

    def run(self, rules: Sequence[Rule]) -> Graph:
        for node in self.graph.nodes:
            self._scope = node.scope
            found = (new for rule in rules if (new := rule(self, node)) is not None)
            replacement = next(found, None)
            if replacement is None:
                names = self.add_many(node.op, *node.inputs, scope="", **dict(node.attributes))
                for old, new in zip(node.outputs, names, strict=True):
                    self.new_names[old.name] = new
            else:
                self.new_names[node.name] = replacement
        return self.builder.build([str(self.new(name)) for name in self.graph.outputs])


Rule: TypeAlias = Callable[[Rewriter, Node], NewName | None]


def rewrite(graph: Graph, rules: Sequence[Rule]) -> Graph:
    """The graph with every match of the rules replaced, until none is left."""
    while True:
        new = Rewriter(graph).run(rules)
        if len(new.nodes) == len(graph.nodes):
            return new
        graph = new


def orders(node: Node | None) -> tuple[tuple[str, str], ...]:
    """The two inputs of a node, in both orders; none where there are not two."""
    if node is None or len(node.inputs) != 2:
        return ()
    a, b = node.inputs
    return (a, b), (b, a)
