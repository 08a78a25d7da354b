"""Builder of graphs, node by node, with types from the operator table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence

from pcg.errors import VerifyError
from pcg.ir.graph import Attribute, Graph, Node, Parameter, Value
from pcg.ir.operators import operator
from pcg.ir.types import TensorType


class Builder:
    """Builds a graph node by node, inferring types from the operator table.

    Equal nodes are merged (common subexpressions), which is sound as operators have no side
    effects.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.inputs: list[Value] = []
        self.parameters: dict[str, Parameter] = {}
        self.nodes: list[Node] = []
        self.types: dict[str, TensorType] = {}
        self.reserved: Container[str] = ()
        """Names that no new node may take: a forward graph's, while its backward is built."""
        self._counts: Counter[str] = Counter()
        self._made: dict[object, tuple[str, ...]] = {}

    @classmethod
    def extending(cls, graph: Graph) -> Builder:
        builder = cls(graph.name)
        for value in graph.inputs:
            builder.input(value.name, value.type)
        for parameter in graph.parameters:
            builder.parameter(parameter)
        for node in graph.nodes:
            builder.append(node)
        return builder

    def input(self, name: str, type_: TensorType) -> str:
        self._define(name, type_)
        self.inputs.append(Value(name, type_))
        return name

    def parameter(self, parameter: Parameter) -> str:
        """Add a parameter; a repeated addition is a no-op."""
        if parameter.name not in self.parameters:
            self._define(parameter.name, parameter.type)
            self.parameters[parameter.name] = parameter
        elif self.parameters[parameter.name] != parameter:
            raise VerifyError(f"graph @{self.name} has another parameter %{parameter.name}")
        return parameter.name

    def append(self, node: Node) -> tuple[str, ...]:
        for value in node.outputs:
            self._define(value.name, value.type)
        self.nodes.append(node)
        names = tuple(value.name for value in node.outputs)
        self._made.setdefault(_node_key(node.op, node.inputs, node.attributes, node.scope), names)
        return names

    def add(
        self,
        op: str,
        inputs: Sequence[str],
        *,
        name: str = "",
        scope: str = "",
        **attributes: Attribute,
    ) -> str:
        return self.add_many(op, inputs, name=name, scope=scope, **attributes)[0]

    def add_many(
        self,
        op: str,
        inputs: Sequence[str],
        *,
        name: str = "",
        scope: str = "",
        **attributes: Attribute,
    ) -> tuple[str, ...]:
        table_entry = operator(op)
        sorted_attributes = tuple(sorted(attributes.items()))
        existing = self.equal_node(op, inputs, sorted_attributes, scope)
        if existing is not None:
            return existing
        unknown = [i for i in inputs if i not in self.types]
        if unknown:
            raise VerifyError(
                f"{op} reads %{unknown[0]}, which graph @{self.name} has not defined before"
            )
        input_types = tuple(self.types[i] for i in inputs)
        table_entry.check_arity(input_types)
        types = table_entry.infer(input_types, attributes)
        suffixes = table_entry.output_suffixes(len(types))
        base = self.fresh(name or op)
        outputs = tuple(
            Value(base if not suffix else self.fresh(f"{base}_{suffix}"), type_)
            for suffix, type_ in zip(suffixes, types, strict=True)
        )
        return self.append(Node(op, tuple(inputs), outputs, sorted_attributes, scope))

    def equal_node(
        self,
        op: str,
        inputs: Sequence[str],
        attributes: tuple[tuple[str, Attribute], ...],
        scope: str,
    ) -> tuple[str, ...] | None:
        """Return the outputs of an existing node equal to this node, or None."""
        return self._made.get(_node_key(op, inputs, attributes, scope))

    def fresh(self, stem: str) -> str:
        name = stem
        while name in self.types or name in self.reserved:
            self._counts[stem] += 1
            name = f"{stem}_{self._counts[stem]}"
        return name

    def build(self, outputs: Iterable[str]) -> Graph:
        """Return the graph with these outputs, without dead code."""
        return Graph(
            self.name,
            tuple(self.inputs),
            tuple(self.parameters.values()),
            tuple(self.nodes),
            tuple(outputs),
        ).without_dead_code()

    def _define(self, name: str, type_: TensorType) -> None:
        if name in self.types:
            raise VerifyError(f"value %{name} is defined twice in graph @{self.name}")
        self.types[name] = type_


def _node_key(
    op: str, inputs: Sequence[str], attributes: tuple[tuple[str, Attribute], ...], scope: str
) -> object:
    """Return a key of equal nodes; it distinguishes 1, 1.0 and True, and 0.0 and -0.0.

    Products of two modules that share a weight differ, as each module may have an adapter.
    """
    return op, tuple(inputs), repr(attributes), scope if op == "linear" else ""
