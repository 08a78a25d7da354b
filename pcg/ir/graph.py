"""The parallel computation graph: values, nodes, graphs, and the builder that makes them.

A graph is in static single assignment form: its nodes are in order, a node names the values that it
reads, and each value is made once, as an input, a parameter or a node's output. Everything is
frozen; a pass makes a new graph.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

from pcg.errors import VerifyError
from pcg.ir.layouts import WHOLE, Layout
from pcg.ir.types import TensorType

if TYPE_CHECKING:
    import networkx

Attribute: TypeAlias = bool | int | float | str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor by name."""

    name: str
    type: TensorType

    def __str__(self) -> str:
        return f"%{self.name}: {self.type}"


@dataclass(frozen=True, slots=True)
class Parameter:
    """A tensor that the graph holds rather than is given.

    Attributes:
        value: its name and type.
        role: `frozen` (a weight of the base model, in its checkpoint), `constant` (computed from
            the config, in the program), `adapter` (a bypass network's, trainable).
        source: the tensor's name in the checkpoint, with `{layer}` for the layer's index.
        transposed: the checkpoint holds [in, out] where the graph has [out, in].
        part: what of it a rank holds; the value's type is of that.
        degree: number of ranks.
        rows: of the first dim of what the source holds, where it is not all: first, and behind the
            last.
    """

    value: Value
    role: str
    source: str
    transposed: bool = False
    part: Layout = WHOLE
    degree: int = 1
    rows: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        return self.value.name

    @property
    def type(self) -> TensorType:
        return self.value.type


@dataclass(frozen=True, slots=True)
class Node:
    """One operator applied.

    Attributes:
        op: the operator's name in the table `pcg.ir.operators`.
        inputs: names of the values read.
        outputs: the values made.
        attributes: the operator's constants.
        scope: path of the module that the node came from, within its layer.
    """

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[Value, ...]
    attributes: tuple[tuple[str, Attribute], ...] = ()
    scope: str = ""

    @property
    def output(self) -> Value:
        """The first output, the only one of most operators."""
        return self.outputs[0]

    @property
    def name(self) -> str:
        """The name of the first output, which names the node too."""
        return self.outputs[0].name

    def attribute(self, name: str) -> Attribute:
        """An attribute by name; KeyError where there is none."""
        return dict(self.attributes)[name]

    def get(self, name: str, default: Attribute | None = None) -> Attribute | None:
        """An attribute by name, or the default."""
        return dict(self.attributes).get(name, default)


@dataclass(frozen=True)
class Graph:
    """A straight-line program over tensors."""

    name: str
    inputs: tuple[Value, ...]
    parameters: tuple[Parameter, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]

    @cached_property
    def types(self) -> Mapping[str, TensorType]:
        """Type of each value by name."""
        types = {value.name: value.type for value in self.inputs}
        types.update({parameter.name: parameter.type for parameter in self.parameters})
        types.update({value.name: value.type for node in self.nodes for value in node.outputs})
        return types

    @cached_property
    def producers(self) -> Mapping[str, Node]:
        """The node that makes a value; inputs and parameters have none."""
        return {value.name: node for node in self.nodes for value in node.outputs}

    @cached_property
    def consumers(self) -> Mapping[str, tuple[Node, ...]]:
        """The nodes that read a value, in order; outputs of the graph are not consumers."""
        readers: dict[str, list[Node]] = {}
        for node in self.nodes:
            for name in dict.fromkeys(node.inputs):
                readers.setdefault(name, []).append(node)
        return {name: tuple(nodes) for name, nodes in readers.items()}

    @cached_property
    def parameters_by_name(self) -> Mapping[str, Parameter]:
        return {parameter.name: parameter for parameter in self.parameters}

    def __str__(self) -> str:
        from pcg.ir.printer import print_graph

        return print_graph(self)

    def replace(self, **changes: object) -> Graph:
        """A copy with other fields."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def to_networkx(self) -> networkx.DiGraph[str]:
        """The value graph for analyses: an edge from each value read to each value made."""
        import networkx

        view: networkx.DiGraph[str] = networkx.DiGraph()
        for name, value_type in self.types.items():
            view.add_node(name, type=value_type, node=self.producers.get(name))
        for node in self.nodes:
            for output in node.outputs:
                view.add_edges_from((name, output.name) for name in node.inputs)
        return view

    def without_dead_code(self) -> Graph:
        """The graph without nodes and parameters that no output needs; inputs stay."""
        live = set(self.outputs)
        kept: list[Node] = []
        for node in reversed(self.nodes):
            if any(value.name in live for value in node.outputs):
                kept.append(node)
                live.update(node.inputs)
        parameters = tuple(p for p in self.parameters if p.name in live)
        return self.replace(parameters=parameters, nodes=tuple(reversed(kept)))

    def renamed(self, names: Mapping[str, str]) -> Graph:
        """The graph with values renamed; a name that the mapping lacks stays."""

        def value(old: Value) -> Value:
            return Value(names.get(old.name, old.name), old.type)

        return Graph(
            self.name,
            tuple(map(value, self.inputs)),
            tuple(dataclasses.replace(p, value=value(p.value)) for p in self.parameters),
            tuple(
                dataclasses.replace(
                    node,
                    inputs=tuple(names.get(name, name) for name in node.inputs),
                    outputs=tuple(map(value, node.outputs)),
                )
                for node in self.nodes
            ),
            tuple(names.get(name, name) for name in self.outputs),
        )


class Builder:
    """Makes a graph node by node, inferring types from the operator table.

    Equal nodes are made once (common subexpressions), which is sound as no operator has effects.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.inputs: list[Value] = []
        self.parameters: dict[str, Parameter] = {}
        self.nodes: list[Node] = []
        self.types: dict[str, TensorType] = {}
        self.reserved: Container[str] = ()
        """Names for no new node: those of a forward graph, while its backward is built."""
        self._counts: Counter[str] = Counter()
        self._made: dict[object, tuple[str, ...]] = {}

    @classmethod
    def extending(cls, graph: Graph) -> Builder:
        """A builder that already holds a graph, for adding nodes at its end."""
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
        """Add a parameter; adding the same one again is a no-op."""
        if parameter.name not in self.parameters:
            self._define(parameter.name, parameter.type)
            self.parameters[parameter.name] = parameter
        elif self.parameters[parameter.name] != parameter:
            raise VerifyError(f"graph @{self.name} has another parameter %{parameter.name}")
        return parameter.name

    def append(self, node: Node) -> tuple[str, ...]:
        """Add a node as it stands."""
        for value in node.outputs:
            self._define(value.name, value.type)
        self.nodes.append(node)
        names = tuple(value.name for value in node.outputs)
        self._made.setdefault(_node_key(node.op, node.inputs, node.attributes), names)
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
        """Apply an operator; returns the name of its first output."""
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
        """Apply an operator of several outputs; returns their names."""
        from pcg.ir.operators import operator

        table_entry = operator(op)
        sorted_attributes = tuple(sorted(attributes.items()))
        key = _node_key(op, inputs, sorted_attributes)
        if key in self._made:
            return self._made[key]
        unknown = [i for i in inputs if i not in self.types]
        if unknown:
            raise VerifyError(
                f"{op} reads %{unknown[0]}, which graph @{self.name} has not defined before"
            )
        input_types = tuple(self.types[i] for i in inputs)
        table_entry.check_arity(input_types)
        types = table_entry.infer(input_types, attributes)
        stem = name or op
        suffixes = table_entry.output_suffixes(len(types))
        base = self.fresh(stem)
        outputs = tuple(
            Value(base if not suffix else self.fresh(f"{base}_{suffix}"), type_)
            for suffix, type_ in zip(suffixes, types, strict=True)
        )
        return self.append(Node(op, tuple(inputs), outputs, sorted_attributes, scope))

    def forget(self, op: str, inputs: Sequence[str], attributes: Mapping[str, Attribute]) -> None:
        """Make the next node like this one anew."""
        self._made.pop(_node_key(op, inputs, tuple(sorted(attributes.items()))), None)

    def fresh(self, stem: str) -> str:
        """A name that no value has yet."""
        if stem not in self.types and stem not in self.reserved:
            return stem
        while True:
            self._counts[stem] += 1
            name = f"{stem}_{self._counts[stem]}"
            if name not in self.types and name not in self.reserved:
                return name

    def build(self, outputs: Iterable[str]) -> Graph:
        """The graph so far, with these outputs and without dead code."""
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
    op: str, inputs: Sequence[str], attributes: tuple[tuple[str, Attribute], ...]
) -> object:
    """What equal nodes share. Not 1, 1.0 and True, nor 0.0 and -0.0, which are equal in Python."""
    return op, tuple(inputs), repr(attributes)
